"""`baton key`: files that the services take, keys that are shown once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.errors import UsageError
from baton.cli.main import typer_app
from baton.servicekit import KeyRole, read_api_keys, watch_secrets
from baton.wire.ticket import TicketKeys


def run(*arguments: object) -> str:
    result = CliRunner().invoke(typer_app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_new_list_and_remove(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    client = run("key", "new", "--file", file, "--max-concurrent", 4, "--weight", 2).strip()
    admin = run("key", "new", "--file", file, "--role", "admin").strip()
    keys = read_api_keys("--file", file)
    one, other = keys.find(client), keys.find(admin)
    assert one is not None
    assert other is not None
    assert (one.role, one.limits.max_concurrent, one.limits.weight, other.role) == (KeyRole.CLIENT, 4, 2.0, KeyRole.ADMIN)
    assert client not in file.read_text()
    assert client.split("-", 2)[2] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("key", "list", "--file", file).splitlines() == [f"{one.id} client max_concurrent=4 weight=2", f"{other.id} admin"]
    run("key", "remove", one.id, "--file", file)
    assert read_api_keys("--file", file).find(client) is None
    assert read_api_keys("--file", file).find(admin) == other


def test_what_people_wrote_into_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys of the web shop")  # without a last newline
    file.chmod(0o640)
    run("key", "new", "--file", file)
    assert file.read_text().startswith("# keys of the web shop\n")
    assert len(read_api_keys("--file", file)) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_file_that_is_no_file_of_keys_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("something else\n")
    with pytest.raises(UsageError, match="line 1"):
        run("key", "new", "--file", file)
    assert file.read_text() == "something else\n"
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        run("key", "new", "--file", tmp_path / "nowhere" / "keys")


def test_a_new_ticket_secret_signs_and_the_earlier_ones_still_verify(tmp_path: Path) -> None:
    file = tmp_path / "tickets"
    run("key", "ticket-secret", "--file", file)
    first = watch_secrets("--ticket-secret-file", file, TicketKeys).value
    run("key", "ticket-secret", "--file", file)
    second = watch_secrets("--ticket-secret-file", file, TicketKeys).value
    assert second.signing_id != first.signing_id
    assert second.key_ids == [second.signing_id, first.signing_id]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
