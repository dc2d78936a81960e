"""The OpenAI-compatible front: Starlette under uvicorn, in the gateway's own event loop."""
