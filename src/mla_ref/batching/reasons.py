"""Why a batch goes where it goes: stable codes, for logs, dashboards and tests."""

from types import MappingProxyType

# The codes in the order in which the rule of `decide` asks for them. A code is never renamed.
REASONS = MappingProxyType(
    {
        "empty": "nobody has a token to run",
        "single-token": "no request has more than one token",
        "mode-off": "the mode is 0: several tokens a request never go to decode",
        "no-spec-config": "no speculative tokens are configured, so nobody verifies drafts",
        "prefill-in-batch": "a request is still prefilling",
        "query-over-n+1": "a request has more tokens than a verifier can, 1 + n",
        "prefilling-unknown": "nobody has said which requests are prefilling",
        "over-max-q": "a request has more tokens than max_q, the most that decode takes",
        "over-planned-rows": "the batch has more rows than the decode plan",
        "verifier": "each request brings its last token and at most n drafts",
        "forced": "the mode is 1, and no request has more tokens than max_q",
    }
)
