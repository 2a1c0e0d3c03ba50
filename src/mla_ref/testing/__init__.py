"""What anyone can run on their own kernel, and the public bugs that the tests here are about."""

from mla_ref.testing.bugs import BUGS, Bug, load_bugs

__all__ = ["BUGS", "Bug", "load_bugs"]
