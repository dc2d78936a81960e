"""`baton` and `python -m baton.cli`: process 1 of a container answers SIGTERM first, then the rest is imported, which takes a second."""

from baton.entry import answer_as_process_1


def main() -> None:
    answer_as_process_1()
    from baton.cli.main import app

    app()


if __name__ == "__main__":
    main()
