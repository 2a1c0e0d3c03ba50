"""Backends by name: the project's table, entry points of other packages, and what goes wrong."""

import sys
import types
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from tests.support import raw

from mla_ref.backends import TorchBackend, backend_names, find_backend, kernel_hash, lookup


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend that other packages add backends: a function of name=value pairs."""

    def install(**places: str) -> None:
        points = [EntryPoint(name, value, lookup.GROUP) for name, value in places.items()]
        found = EntryPoints(points)
        monkeypatch.setattr(lookup, "entry_points", lambda group: found.select(group=group))

    install()
    return install


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module called `someones_kernels`."""
    made = types.ModuleType("someones_kernels")
    monkeypatch.setitem(sys.modules, "someones_kernels", made)
    return made


class Mine(TorchBackend):
    """A backend of another name."""

    @property
    def name(self) -> str:
        return "mine"


def test_the_table_of_the_project(installed) -> None:
    assert backend_names()[0] == "torch"
    for name in lookup.BUILT_IN:
        assert name in backend_names()
    assert isinstance(find_backend("torch"), TorchBackend)


def test_a_class_of_another_package_is_made(installed, module) -> None:
    module.Mine = Mine
    installed(mine="someones_kernels:Mine")
    assert "mine" in backend_names()
    found = find_backend("mine")
    assert type(found) is Mine and found.name == "mine"


def test_an_object_of_another_package_is_taken_as_it_is(installed, module) -> None:
    module.ready = Mine(multiprocessors=3)
    installed(mine="someones_kernels:ready")
    assert find_backend("mine") is module.ready


def test_names_are_sorted_and_the_project_has_its_own(installed, module) -> None:
    module.Mine = Mine
    installed(zeta="z:Z", alpha="a:A", torch="someones_kernels:Mine")
    names = backend_names()
    assert names.count("torch") == 1 and names[-2:] == ("alpha", "zeta")
    assert type(find_backend("torch")) is TorchBackend


def test_an_unknown_name_lists_those_there_are(installed) -> None:
    installed(mine="someones_kernels:Mine")
    with pytest.raises(ValueError, match=r"backend must be one of torch.*, mine, got 'trition'"):
        find_backend("trition")


@pytest.mark.parametrize("wrong", [None, 3, TorchBackend])
def test_what_is_no_name_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match="name must be a backend's name"):
        raw(find_backend)(wrong)


@pytest.mark.parametrize(
    ("place", "missing"),
    [("no_such_package.kernels:Mine", "no_such_package"), ("someones_kernels:Yours", "Yours")],
)
def test_B121_what_cannot_be_imported_is_named_when_it_is_asked_for(
    installed, module, place: str, missing: str
) -> None:
    """Listing names imports nothing, so a machine without the package still has the others."""
    installed(mine=place)
    assert "mine" in backend_names()
    assert isinstance(find_backend("torch"), TorchBackend)
    with pytest.raises(
        ImportError, match=rf"backend 'mine' \({place}\) cannot be used: .*{missing}"
    ):
        find_backend("mine")


@pytest.mark.parametrize("thing", [len, "text", types.SimpleNamespace(name="x", parts={})])
def test_what_is_no_backend_is_a_type_error(installed, module, thing: object) -> None:
    module.thing = thing
    installed(mine="someones_kernels:thing")
    with pytest.raises(TypeError, match=r"backend 'mine' .* must have name, parts, supports, plan"):
        find_backend("mine")


def test_what_numbers_belong_to_is_a_property_a_method_or_nothing() -> None:
    class Property:
        source_hash = "a-b"

    class Method:
        def source_hash(self) -> str:
            return "c"

    assert [kernel_hash(x) for x in (Property(), Method(), TorchBackend(), None)] == [
        "a-b",
        "c",
        None,
        None,
    ]
