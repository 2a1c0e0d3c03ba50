"""Models whose attention climbs the ladder: SmolLM2 in MLA form, and DeepSeek-shaped layers."""
