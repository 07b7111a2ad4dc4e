"""The suffix tells the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flashrl.core.profiles import Profile
from flashrl.core.profiles.files import load_profile, save_profile
from flashrl.errors import ConfigError, ProfileError

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def profile() -> Profile:
    return Profile(scheme="int8", scales={UP: torch.tensor([[0.5], [0.25]])})


def test_each_suffix_is_a_format_and_both_read_back(tmp_path: Path, profile: Profile) -> None:
    save_profile(profile, tmp_path / "p.pt")
    save_profile(profile, tmp_path / "p.safetensors")
    entry = torch.load(tmp_path / "p.pt", weights_only=True)[UP]
    assert torch.equal(entry["output_scale"], torch.tensor([[2.0], [4.0]]))
    assert torch.equal(load_file(tmp_path / "p.safetensors")[f"scale:{UP}"], profile.scales[UP])
    for name in ("p.pt", "p.safetensors"):
        assert torch.equal(load_profile(tmp_path / name).scales[UP], profile.scales[UP])


def test_a_list_of_names_is_for_the_scheme_given(tmp_path: Path) -> None:
    torch.save([UP], tmp_path / "p.pt")
    assert load_profile(tmp_path / "p.pt").scheme == "fp8_channel"
    assert load_profile(tmp_path / "p.pt", scheme="fp8_tensor").scheme == "fp8_tensor"


@pytest.mark.parametrize("name", ["p.bin", "p", "p.PT"])
def test_another_suffix_is_refused(name: str, tmp_path: Path, profile: Profile) -> None:
    with pytest.raises(ProfileError, match=r"must end in \.safetensors"):
        save_profile(profile, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProfileError, match=r"must end in \.safetensors"):
        load_profile(tmp_path / name)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_profile(tmp_path / "p.pt")
