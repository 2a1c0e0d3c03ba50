"""IndexShare: GLM-5.2's published layers, and all layers where nothing is shared."""

from mla_ref.layers import full_layers, index_source


def test_glm_5_2_has_21_indexers() -> None:
    full = full_layers(78, freq=4, offset=3)
    assert full == (0, 1, 2, *range(6, 75, 4))
    assert len(full) == 21
    # A port that takes layer mod 4 would say 0, 4, 8, ...
    assert 4 not in full


def test_the_default_shares_nothing() -> None:
    assert full_layers(61) == tuple(range(61))


def test_a_layer_takes_the_nearest_list_before_it() -> None:
    full = full_layers(12, freq=4, offset=3)
    sources = [index_source(i, full) for i in range(12)]
    assert sources == [0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10]
