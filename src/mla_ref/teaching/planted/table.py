"""The table of planted bugs: whose they were, where each stands here, and the cure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_ref.teaching.planted.absorbed import latent_attention_scaled_by_its_row
from mla_ref.teaching.planted.addresses import row_addresses_in_32_bits
from mla_ref.teaching.planted.checking import lengths_to_check, no_difference_above
from mla_ref.teaching.planted.clocks import LaunchClock
from mla_ref.teaching.planted.fp8 import (
    pack_fp8_rows_without_floor,
    unpack_fp8_rows_by_exponent,
)
from mla_ref.teaching.planted.indexing import (
    index_scores_without_relu,
    select_topk_unchecked,
)
from mla_ref.teaching.planted.masks import finite_mask_attention, top_left_causal_attention
from mla_ref.teaching.planted.merging import (
    backward_tiles_without_guard,
    merge_in_base_2,
    merge_without_guard,
)
from mla_ref.teaching.planted.paging import neighbouring_pages_attention, whole_page_attention
from mla_ref.teaching.planted.parallel import Base2Backend, local_lens_counted_down
from mla_ref.teaching.planted.rope import rope_in_halves, rope_table_in_bfloat16
from mla_ref.teaching.planted.scale import scale_from_mscale, scale_without_mscale
from mla_ref.teaching.planted.sizing import bytes_without_index_keys
from mla_ref.teaching.planted.sparse import (
    sparse_decode_with_a_sink_a_split,
    sparse_extend_reading_before_the_cache,
)
from mla_ref.teaching.planted.speculative import (
    rejection_sample_counting_all,
    rejection_sample_residual_at_the_draft,
)
from mla_ref.teaching.planted.verifier import (
    causal_attention_hiding_candidates,
    is_verifier_batch_with_padding,
)
from mla_ref.teaching.planted.warps import ImpatientRing


@dataclass(frozen=True)
class PlantedBug:
    """A planted bug.

    Attributes:
        id: Its number in the bug museum.
        reports: Public reports, owner/repository#number.
        function: The function that has it.
        instead_of: The right function's name in this library.
        cure: What the right one does, in a sentence.
    """

    id: str
    reports: tuple[str, ...]
    function: Callable[..., Any]
    instead_of: str
    cure: str


PLANTED: tuple[PlantedBug, ...] = (
    PlantedBug(
        "B175",
        ("siboehm/SGEMM_CUDA#20",),
        no_difference_above,
        "mla_ref.numerics.compare",
        "Positions of NaN and infinities are compared first, and only then are numbers.",
    ),
    PlantedBug(
        "B176",
        ("Infatoshi/kernelbench.com#11", "AMD-AGI/AgentKernelArena#82"),
        lengths_to_check,
        "mla_ref.bench.measure",
        "The result of the timed call itself is checked, before the first and after the last.",
    ),
    PlantedBug(
        "B077",
        ("pytorch/pytorch#103082", "pytorch/pytorch#108108", "Dao-AILab/flash-attention#1778"),
        top_left_causal_attention,
        "mla_ref.attention.causal_attention",
        "Row i sees s_kv - s_q + i + 1 keys: the mask is aligned at the bottom right.",
    ),
    PlantedBug(
        "B064",
        ("ohdearquant/lattice#374",),
        finite_mask_attention,
        "mla_ref.attention.vectorised_attention",
        "Hidden scores are -inf, and a row that sees nothing is 0 with LSE -inf by definition.",
    ),
    PlantedBug(
        "B066",
        ("vllm-project/vllm#27491", "vllm-project/vllm#39148", "flashinfer-ai/flashinfer#4051"),
        merge_without_guard,
        "mla_ref.numerics.merge",
        "Where both parts are empty, 0 is subtracted in place of -inf.",
    ),
    PlantedBug(
        "B110",
        ("sgl-project/sglang#33064", "vllm-project/vllm#28840"),
        merge_in_base_2,
        "mla_ref.numerics.merge",
        "One base everywhere, natural; a foreign LSE is converted by name, with to_natural_lse.",
    ),
    PlantedBug(
        "B063",
        ("vllm-project/vllm#48364",),
        backward_tiles_without_guard,
        "mla_ref.attention.online_attention",
        "A row whose running maximum is still -inf subtracts 0 in its place.",
    ),
    PlantedBug(
        "B171",
        ("sgl-project/sglang#11309",),
        bytes_without_index_keys,
        "mla_ref.cache.bytes_per_token",
        "What plans the pool and what allocates it come from one source: rows and index keys.",
    ),
    PlantedBug(
        "B065",
        (
            "vllm-project/vllm#936",
            "Dao-AILab/flash-attention#1745",
            "Dao-AILab/flash-attention#2374",
        ),
        whole_page_attention,
        "mla_ref.attention.paged_attention",
        "Rows that no token occupies are not read; a kernel that must read them selects zeros.",
    ),
    PlantedBug(
        "B172",
        ("tanishqkumar/ssd#23",),
        neighbouring_pages_attention,
        "mla_ref.attention.paged_attention",
        "Every page is looked up in the block table, and tests shuffle their pages.",
    ),
    PlantedBug(
        "B023",
        (
            "sgl-project/sglang#13530",
            "vllm-project/vllm#28968",
            "huggingface/transformers#46842",
        ),
        rope_in_halves,
        "mla_ref.layers.apply_rope",
        "The layout is stated with the model, has no default, and is read where pairs are turned.",
    ),
    PlantedBug(
        "B161",
        (
            "huggingface/transformers#29285",
            "sgl-project/sglang-jax#1472",
            "huggingface/candle#3520",
        ),
        rope_table_in_bfloat16,
        "mla_ref.layers.rope_table",
        "Positions, frequencies and angles in float64; only the cosine and sine are rounded.",
    ),
    PlantedBug(
        "B079",
        (
            "huggingface/transformers#47435",
            "onnxruntime/mobius#548",
            "huggingface/optimum-intel#1877",
        ),
        scale_without_mscale,
        "mla_ref.layers.default_softmax_scale",
        "The scale is computed where the model is described and passed all the way down.",
    ),
    PlantedBug(
        "B079",
        ("NVIDIA/Megatron-LM#1429",),
        scale_from_mscale,
        "mla_ref.layers.default_softmax_scale",
        "The factor on the scale comes from mscale_all_dim; a test has both settings differ.",
    ),
    PlantedBug(
        "B079",
        ("ollama/ollama#13893",),
        latent_attention_scaled_by_its_row,
        "mla_ref.attention.latent_attention",
        "The scale comes from the head before absorption, and is always passed.",
    ),
    PlantedBug(
        "B049",
        ("vllm-project/vllm#49435", "deepseek-ai/FlashMLA#184"),
        unpack_fp8_rows_by_exponent,
        "mla_ref.cache.unpack_fp8_rows",
        "The reader takes the stored scale as it is; a writer for others rounds it up to 2^n.",
    ),
    PlantedBug(
        "B048",
        ("huggingface/kernels-community#681", "InternLM/lmdeploy#3652"),
        pack_fp8_rows_without_floor,
        "mla_ref.cache.pack_fp8_rows",
        "A scale is at least the smallest normal float32, so that 0 / scale is 0.",
    ),
    PlantedBug(
        "B026",
        ("huggingface/transformers#44360",),
        index_scores_without_relu,
        "mla_ref.indexer.index_scores",
        "Each head's product goes through the ReLU before the weighted sum.",
    ),
    PlantedBug(
        "B034",
        ("vllm-project/vllm#50201", "radixark/miles#1122", "sgl-project/sglang#30645"),
        select_topk_unchecked,
        "mla_ref.indexer.select_topk",
        "NaN and hidden keys are -inf, what is -inf becomes -1, and the sort is stable.",
    ),
    PlantedBug(
        "B065",
        ("radixark/miles#2079",),
        sparse_extend_reading_before_the_cache,
        "mla_ref.attention.sparse_extend",
        "What an invalid entry fetched is replaced by zeros before anything is multiplied.",
    ),
    PlantedBug(
        "B075",
        ("flashinfer-ai/flashinfer#5119",),
        sparse_decode_with_a_sink_a_split,
        "mla_ref.attention.sparse_decode",
        "The LSE of a part is without the sink, which is applied once, after the last merge.",
    ),
    PlantedBug(
        "B096",
        ("vllm-project/vllm#2658",),
        rejection_sample_counting_all,
        "mla_ref.speculative.rejection_sample",
        "Only the leading accepted drafts count: a cumulative product, then the sum.",
    ),
    PlantedBug(
        "B098",
        ("xLLM-AI/xllm#2175",),
        rejection_sample_residual_at_the_draft,
        "mla_ref.speculative.rejection_sample",
        "What is recovered has the weights max(p - q, 0) over the whole vocabulary.",
    ),
    PlantedBug(
        "B001",
        ("local-inference-lab/vllm#164",),
        causal_attention_hiding_candidates,
        "mla_ref.attention.causal_attention",
        "All rows of a step are written before attention, and each has its own causal length.",
    ),
    PlantedBug(
        "B001",
        ("vllm-project/vllm#41841",),
        is_verifier_batch_with_padding,
        "mla_ref.batching.is_verifier_batch",
        "Only a real request with a token to run can be prefilling; padding is cut off first.",
    ),
    PlantedBug(
        "B111",
        ("flashinfer-ai/flashinfer#4485", "vllm-project/vllm#47079", "sgl-project/sglang#40903"),
        Base2Backend,
        "mla_ref.backends.TorchBackend",
        "A plan for ranks is tried on keys of known LSE; another base is converted by name.",
    ),
    PlantedBug(
        "B115",
        ("ROCm/ATOM#2118", "lightseekorg/tokenspeed#364"),
        local_lens_counted_down,
        "mla_ref.parallel.local_lens",
        "A share is a function of the row's global length, never of another share.",
    ),
    PlantedBug(
        "B059",
        ("vllm-project/vllm#47671", "vllm-project/vllm#50427", "ROCm/aiter#4474"),
        row_addresses_in_32_bits,
        "mla_ref.teaching.tile_model.row_addresses",
        "The slot, or its page, is widened to 64 bits before it is multiplied by a stride.",
    ),
    PlantedBug(
        "B173",
        ("NVIDIA/Fuser#3438", "ashalliants/ninfer-3090#49", "lablup/mlxcel#923"),
        ImpatientRing,
        "mla_ref.teaching.warp_memory.Ring",
        "Who reads waits first, for its own copies and for those of all others that it reads.",
    ),
    PlantedBug(
        "B174",
        ("TristanBilot/mlx-benchmark#21", "pytorch/pytorch#177765"),
        LaunchClock,
        "mla_ref.bench.WallClock",
        "The clock starts when the device has nothing to do and stops when it has done its work.",
    ),
)
