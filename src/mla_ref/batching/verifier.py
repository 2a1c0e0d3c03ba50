"""Rung 11: verifier batches. A request brings 1 + n new tokens: the last one, and n drafts of it.

Checked against one-token steps of rung 10. The rows of all candidates are written before the
attention runs, so a later candidate finds the earlier ones in the cache; and each row has its own
causal length. Nothing else is needed: to the attention a verifier batch is just more rows, and the
kernel for few rows serves it. That it would miss the earlier drafts is what was believed
(local-inference-lab/vllm#164), and what sent these batches to the slow kernel.

    request r with 3 drafts, L tokens in the cache    sees      its logits
    row 0   last token     position L                 L + 1     judge draft 0
    row 1   draft 0        position L + 1             L + 2     judge draft 1
    row 2   draft 1        position L + 2             L + 3     judge draft 2
    row 3   draft 2        position L + 3             L + 4     give the bonus token
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.batching.facts import host_counts
from mla_ref.batching.step import Step
from mla_ref.checks import describe


def one_row_requests(step: Step) -> Step:
    """The same step with every new token as a request of its own.

    What kernels need that take one query row a request (TensorRT-LLM#9045): rows stay in their
    order, request by request, each with the pages of its request and its own causal length. Padded
    rows become padded requests. Nothing is read back from the device.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must be a Step, got {describe(step)}")
    rows = step.num_tokens_padded
    ones = torch.arange(rows + 1, device=step.positions.device).clamp(max=step.num_tokens)
    real = step.request_of_row >= 0
    if step.num_reqs_padded:
        tables = step.block_table[step.request_of_row.clamp(min=0)]
    else:  # rows of padding alone: there is no table to look anything up in
        tables = step.block_table.new_full((rows, step.block_table.shape[1]), -1)
    prefilling = None
    if step.is_prefilling is not None:
        repeats = torch.tensor(step.query_lens, dtype=torch.int64)
        prefilling = step.is_prefilling.repeat_interleave(repeats)
        prefilling = torch.nn.functional.pad(prefilling, (0, rows - step.num_tokens))
    return replace(
        step,
        query_start_loc=ones,
        seq_lens=step.visible_lens,
        block_table=torch.where(real[:, None], tables, -1),
        request_of_row=torch.where(real, torch.arange(rows, device=real.device), -1),
        query_lens=(1,) * step.num_tokens + (0,) * (rows - step.num_tokens),
        is_prefilling=prefilling,
        num_reqs=step.num_tokens,
        host=None,
    )


@dataclass(frozen=True)
class VerifierRows:
    """Which rows of a step's logits judge which draft.

    Attributes:
        logits: Rows of the step whose logits are needed: of a request with drafts the last token
            and every draft, of others the last row.
        target: Places in `logits` that judge a draft, draft after draft.
        bonus: Place in `logits` that gives each request its next token if no draft is refused.
        draft: Rows of the step that hold the drafts, to look their token ids up.
    """

    logits: Int[Tensor, " rows"]
    target: Int[Tensor, " drafts"]
    bonus: Int[Tensor, " num_reqs"]
    draft: Int[Tensor, " drafts"]

    @classmethod
    def of(cls, query_lens: Sequence[int], num_drafts: Sequence[int]) -> "VerifierRows":
        """Lay out the rows of a batch.

        Args:
            query_lens: New tokens of each request.
            num_drafts: How many of them, at the end, are drafts; 0 for a chunk of a prompt.

        Raises:
            ValueError: The lists differ in length, or a request has no token before its drafts.
        """
        lens = host_counts("query_lens", query_lens)
        counts = host_counts("num_drafts", num_drafts)
        if len(lens) != len(counts):
            raise ValueError(
                f"query_lens has {len(lens)} requests but num_drafts has {len(counts)}"
            )
        logits: list[int] = []
        target: list[int] = []
        bonus: list[int] = []
        end = 0
        for request, (length, drafts) in enumerate(zip(lens, counts, strict=True)):
            if drafts >= length:
                raise ValueError(
                    f"num_drafts[{request}] must be below the request's {length} new tokens, got "
                    f"{drafts}"
                )
            end += length
            target += range(len(logits), len(logits) + drafts)
            logits += range(end - drafts - 1, end)
            bonus.append(len(logits) - 1)
        rows = torch.tensor(logits, dtype=torch.int64)
        judging = torch.tensor(target, dtype=torch.int64)
        return cls(rows, judging, torch.tensor(bonus, dtype=torch.int64), rows[judging] + 1)
