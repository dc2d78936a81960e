"""Generated from protos/baton/v1 by libs/wire/generate.py; do not edit."""
