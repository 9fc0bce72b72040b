import json
import shutil

import pytest
import torch

from halfword.checkpoint import CheckpointError, folder, read, verify, write

TENSORS = {
    "model.w": torch.randn(33, 7).bfloat16(),
    "optimizer.w.remainder": torch.arange(-115, 116).reshape(33, 7).to(torch.int16),
    "optimizer.w.remainder8": torch.ones(4, dtype=torch.int8),
    "optimizer.w.exp_avg": torch.randn(7, 33).t(),
    "optimizer.w.step": torch.tensor(3.0),
    "optimizer.empty.exp_avg": torch.zeros(0, 3),
}


@pytest.fixture
def saved(tmp_path):
    target = tmp_path / "step-00000003"
    write(target, 3, TENSORS, {"position": 12})
    return target


def test_what_is_read_is_what_was_written(saved):
    manifest, tensors, state = read(saved)
    assert manifest.step == 3 and state == {"position": 12}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_no_file_is_a_pickle(saved):
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}


def _files(saved):
    return sorted(path.name for path in saved.iterdir())


def test_every_flipped_bit_and_every_cut_is_refused(saved):
    for name in _files(saved):
        path = saved / name
        whole = path.read_bytes()
        for position in (0, len(whole) // 2, len(whole) - 3):
            damaged = bytearray(whole)
            damaged[position] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                read(saved)
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError):
            read(saved)
        path.write_bytes(b"")
        with pytest.raises(CheckpointError):
            read(saved)
        path.write_bytes(whole)
    read(saved)


def test_a_missing_or_foreign_file_is_named(saved):
    (saved / "extra.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="extra.bin does not belong to it"):
        verify(saved)
    (saved / "extra.bin").unlink()
    (saved / "state.json").unlink()
    with pytest.raises(CheckpointError, match="state.json is missing; use another checkpoint"):
        verify(saved)


def test_weights_of_one_step_with_remainders_of_another_are_refused(saved, tmp_path):
    """Also where someone has rewritten the manifest to match the files."""
    other = tmp_path / "step-00000004"
    changed = TENSORS | {"optimizer.w.remainder": TENSORS["optimizer.w.remainder"] + 1}
    write(other, 4, changed, {"position": 16})
    name = next(name for name in _files(saved) if "00002-of" in name)
    shutil.copy(other / name, saved / name)
    with pytest.raises(CheckpointError, match="is damaged; use another checkpoint"):
        read(saved)
    manifest = json.loads((saved / "manifest.json").read_text())
    theirs = json.loads((other / "manifest.json").read_text())
    manifest["files"][name] = theirs["files"][name]
    del manifest["sha256"]
    (saved / "manifest.json").write_text(json.dumps(folder._signed(manifest)))
    with pytest.raises(CheckpointError, match="its tensors do not belong together"):
        read(saved)


def test_a_newer_version_and_a_foreign_folder_are_told_apart(saved, tmp_path):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"version": 3}))
    with pytest.raises(CheckpointError, match="version 3; this halfword reads 2: update it"):
        read(saved)
    (saved / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    with pytest.raises(CheckpointError, match="version 1; .* reads 2: use the one that wrote it"):
        read(saved)
    (saved / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match="no checkpoint of halfword"):
        read(saved)
    with pytest.raises(CheckpointError, match=r"no checkpoint, for it has no manifest\.json"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint, for it has no manifest"):
        read(tmp_path / "nowhere")


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write_json", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "step-00000001", 1, TENSORS, {})
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_changed_is_noticed(tmp_path, monkeypatch):
    read_back = folder.read_pieces

    def flipped(files):
        return {
            piece: line.replace("bfloat16", "float16") for piece, line in read_back(files).items()
        }

    monkeypatch.setattr(folder, "read_pieces", flipped)
    with pytest.raises(CheckpointError, match="what was read back is not what was saved"):
        write(tmp_path / "step-00000001", 1, TENSORS, {})
    assert list(tmp_path.iterdir()) == []
