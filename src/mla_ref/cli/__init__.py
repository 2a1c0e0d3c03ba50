"""The command `mla-ref`: `app` holds the table of verbs, each verb is a module beside it."""


def main() -> None:
    """Run the command line in `sys.argv` and leave the process with its exit code.

    Raises:
        SystemExit: always: 0 done, 1 the verb found something wrong, 2 the input was wrong.
    """
    from mla_ref.cli.app import app

    app(prog_name="mla-ref")
