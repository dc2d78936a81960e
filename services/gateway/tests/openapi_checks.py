"""schemathesis's hooks for the HTTP front: what may be refused although a schema takes it, and nothing else."""

from __future__ import annotations

import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.generation import GenerationMode

#: Causes that no schema can say: sizes against the context, a chat template's own rules, two names of one limit.
UNSAID = {"structured_output", "prompt_too_long", "chat_template", "out_of_range", "invalid_request", "prompt_empty"}


@schemathesis.check
def what_the_schema_takes_is_taken(ctx: CheckContext, response: Response, case: Case) -> None:
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or response.status_code < 400:
        return
    if response.status_code == 404 and "/models/" in case.path:
        return  # any name is one, one is served
    error = response.json()["error"]
    assert response.status_code == 400, f"a body that the schema takes ended with {response.status_code}: {error}"
    assert error["code"] in UNSAID, f"the schema takes what the front refuses: {error}"


@schemathesis.check
def an_error_says_what_and_where(ctx: CheckContext, response: Response, case: Case) -> None:
    if response.status_code >= 400 and response.status_code != 503:
        error = response.json()["error"]
        assert error["message"], error
        assert error["code"], error
