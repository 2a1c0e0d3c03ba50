"""What a cell prints in one go stands in one block, whatever pieces the kernel sent.

A kernel cuts printed text by the clock, inside a line too. MyST-NB's own `nb_merge_streams` ends
each piece with a line break, so that a slow machine's page had lines the lesson never printed, and
it moves all that a cell prints to before the cell's first figure.
"""

from docutils import nodes
from sphinx.transforms import SphinxTransform


class JoinedStreams(SphinxTransform):
    """Join neighbouring blocks of the same stream, without a character between them."""

    default_priority = 200

    def apply(self, **_: object) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            before = block.previous_sibling()
            if {"stream", "stderr"} & set(block["classes"]) and alike(before, block):
                text = before.astext() + block.astext()
                before.rawsource = text
                before[:] = [nodes.Text(text)]
                block.parent.remove(block)


def alike(before: nodes.Node | None, block: nodes.literal_block) -> bool:
    """Whether a node is a block of the same kind of output."""
    return isinstance(before, nodes.literal_block) and before["classes"] == block["classes"]


def setup(app):
    app.add_transform(JoinedStreams)
    return {"parallel_read_safe": True}
