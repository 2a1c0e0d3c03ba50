"""Where keys and values live between steps: pages, slots and rows."""

from mla_ref.cache.pages import gather_rows, pages_needed, slot_mapping, write_rows

__all__ = ["gather_rows", "pages_needed", "slot_mapping", "write_rows"]
