"""PointNet and point clouds: the published network, files as they are found in the wild, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.points.classifier import PointClassifier
from pl_pipe.recipes.points.cloud_file import Mesh, read_cloud, read_off, surface_points
from pl_pipe.recipes.points.datamodule import in_unit_ball, turns
from pl_pipe.recipes.points.network import PointNet, distance_from_rotations
from pl_pipe.recipes.points.point_files import PointFilesData
from pl_pipe.recipes.points.shapes import SHAPES, ShapesData, draw_shapes

SQUARE = "OFF\n4 1 0\n0 0 0\n2 0 0\n2 2 0\n0 2 0\n4 0 1 2 3\n"


def test_the_published_network_takes_the_published_batch() -> None:
    """32 clouds of 2,500 points, 16 classes; the parameters are counted from the paper's layer sizes."""
    with torch.device("meta"):
        network = PointNet(16)
        logits, transform = network(torch.empty(32, 2500, 3))
    assert (logits.shape, transform.shape) == ((32, 16), (32, 64, 64))  # type: ignore[union-attr]
    tnet = {3: 3 * 64 + 64, 64: 64 * 64 + 64}
    shared = 64 * 128 + 128 + 128 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256
    norms = 2 * (64 + 128 + 1024 + 512 + 256)
    expected = sum(first + shared + norms + 256 * side * side + side * side for side, first in tnet.items())
    expected += tnet[3] + shared + norms + 256 * 16 + 16
    assert sum(p.numel() for p in network.parameters()) == expected


def test_training_starts_from_the_identity_and_the_order_of_points_does_not_matter() -> None:
    torch.manual_seed(0)
    network = PointNet(5, width=0.2).eval()
    points = torch.randn(3, 40, 3)
    logits, transform = network(points)
    assert torch.equal(network.input_transform(points.transpose(1, 2)), torch.eye(3).expand(3, 3, 3))
    assert transform is not None
    assert distance_from_rotations(transform).item() == 0
    nn.init.normal_(network.input_transform.dense[-1].weight, std=0.05)  # type: ignore[arg-type]
    logits = network(points)[0]
    torch.testing.assert_close(network(points[:, torch.randperm(40)])[0], logits)
    assert not torch.allclose(network(points * 1.5)[0], logits)


def test_the_transforms_turn_points_as_matrices_do() -> None:
    """The network with a fixed turn is the network without one on turned points."""
    torch.manual_seed(1)
    network = PointNet(4, width=0.2, feature_transform=False).eval()
    points, turn = torch.randn(2, 30, 3), turns(torch.tensor([0.7]), axis=2)[0]
    expected = network(points @ turn)[0]
    with torch.no_grad():
        network.input_transform.dense[-1].bias.copy_(turn.flatten())  # type: ignore[union-attr,operator]
    torch.testing.assert_close(network(points)[0], expected)


def test_distance_from_rotations() -> None:
    rotation = turns(torch.tensor([1.1]), axis=0)
    assert float(distance_from_rotations(rotation)) == pytest.approx(0, abs=1e-12)
    # 2A: 4·1 − 1 = 3 on each of three places; A = 0 misses the identity by 1 on each.
    assert float(distance_from_rotations(torch.cat([2 * rotation, 0 * rotation]))) == pytest.approx((27 + 3) / 2)


def test_the_loss_has_the_regularizer() -> None:
    torch.manual_seed(2)
    model = PointClassifier(3, width=0.1, dropout=0.0, regularization=0.5)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    nn.init.normal_(model.network.feature_transform.dense[-1].weight, std=0.05)  # type: ignore[union-attr,arg-type]
    batch = torch.randn(4, 20, 3), torch.tensor([0, 1, 2, 0])
    logits, transform = model.network(batch[0])
    expected = nn.functional.cross_entropy(logits, batch[1]) + 0.5 * distance_from_rotations(transform)
    assert float(model.training_step(batch, 0).detach()) == pytest.approx(expected.item(), rel=1e-6)
    assert float(distance_from_rotations(transform)) > 0.01


def test_shapes_are_balanced_repeat_and_lie_in_the_unit_ball() -> None:
    points, labels = draw_shapes(80, num_points=50, noise=0.02, seed=1)
    assert points.shape == (80, 50, 3)
    assert torch.bincount(labels).tolist() == [10] * len(SHAPES)
    torch.testing.assert_close(points.norm(dim=2).amax(dim=1), torch.ones(80))
    assert torch.equal(points, draw_shapes(80, num_points=50, noise=0.02, seed=1)[0])
    assert not torch.equal(points, draw_shapes(80, num_points=50, noise=0.02, seed=2)[0])


def test_a_ranks_lone_last_sample_is_left_out() -> None:
    """66 clouds in batches of 32: two are left for one process, one for each of two; batch norm wants two."""

    def batches(samples: int, ranks: int | None) -> int:
        data = ShapesData(num_samples=samples, num_points=4, batch_size=32)
        data.setup("fit")
        kwargs = {} if ranks is None else {"num_replicas": ranks, "rank": 0}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs or None)  # type: ignore[assignment]
        loader = data.train_dataloader()
        assert len(data.val_dataloader()) == 8
        return len(loader) if ranks is None else int(loader.drop_last)

    assert [batches(samples, None) for samples in (64, 65, 66)] == [2, 2, 3]
    assert [batches(samples, 2) for samples in (64, 65, 66, 67, 130)] == [0, 1, 1, 0, 1]
    with pytest.raises(DataError, match=r"has 2 sample\(s\) for 2 ranks, and batch norm cannot train on one alone"):
        batches(2, 2)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("sphere", lambda p: p.norm(dim=-1) - 1),
        ("box", lambda p: p.abs().amax(dim=-1) - 1),
        ("torus", lambda p: (p[..., :2].norm(dim=-1) - 1).square() + p[..., 2].square() - 0.35**2),
        ("cylinder", lambda p: torch.minimum((p[..., :2].norm(dim=-1) - 1).abs(), (p[..., 2].abs() - 1).abs())),
    ],
)
def test_points_lie_on_their_surface(name: str, holds) -> None:  # type: ignore[no-untyped-def]
    u, v, w = torch.rand(3, 2, 4000, generator=torch.Generator().manual_seed(0))
    points = SHAPES[name](u, v, w)
    assert holds(points).abs().max() < 1e-5
    assert points.mean(dim=1).abs().max() < 0.1, "one side has more points than the other"
    if name == "box":
        on_face = (points.abs() > 1 - 1e-6).float().mean(dim=(0, 1))
        assert on_face.tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_off_files_with_their_quirks(tmp_path: Path) -> None:
    plain, glued, noted = tmp_path / "a.off", tmp_path / "b.off", tmp_path / "c.OFF"
    plain.write_text(SQUARE)
    glued.write_text(SQUARE.replace("OFF\n", "OFF"))
    noted.write_text("# a square\n" + SQUARE.replace("4 1 0\n", "4 1 0 # counts\n"))
    halves, coloured = tmp_path / "d.off", tmp_path / "e.off"
    halves.write_text(SQUARE.replace("4 1 0", "4 2 0").replace("4 0 1 2 3", "3 0 1 2\n3 0 2 3"))
    coloured.write_text(SQUARE.replace("4 0 1 2 3", "4 0 1 2 3 255 0 0"))
    for path in (plain, glued, noted, halves, coloured):
        mesh = read_off(path)
        assert mesh.vertices.shape == (4, 3)
        assert mesh.triangles.tolist() == [[0, 1, 2], [0, 2, 3]]
    points = read_cloud(plain, 2000, np.random.default_rng(0))
    assert points.dtype == np.float32
    assert points.min() >= 0
    assert points.max() <= 2
    assert points.mean(axis=0).tolist() == pytest.approx([1, 1, 0], abs=0.05)


def test_large_triangles_get_more_points() -> None:
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [10, 0, 0], [13, 0, 0], [10, 3, 0]], dtype=np.float32)
    points = surface_points(Mesh(vertices, np.array([[0, 1, 2], [3, 4, 5]])), 5000, np.random.default_rng(0))
    assert (points[:, 0] > 5).mean() == pytest.approx(0.9, abs=0.02)
    small = points[points[:, 0] < 5]
    assert small[:, :2].mean(axis=0).tolist() == pytest.approx([1 / 3, 1 / 3], abs=0.05)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.off", "PLY\n", "does not begin with OFF"),
        ("a.off", SQUARE[:-6], "is cut short"),
        ("a.off", "OFF\n4 1 0\n0 0 0\n", "is cut short"),
        ("a.off", SQUARE.replace("4 0 1 2 3", "3 0 1 9"), "vertices that it does not list"),
        ("a.off", "OFF\n1 0 0\n0 0 0\n", "no surface"),
        ("a.off", SQUARE.replace("2 2 0", "2 x 0"), "something else than numbers"),
        ("a.off", SQUARE.replace("4 1 0", "4 2 0"), "2 faces promised, 1 found"),
        ("a.off", SQUARE.replace("2 2 0", "nan 2 0"), "coordinates that are no numbers"),
        ("a.txt", "1 2\n3 4\n", "rows of at least three numbers"),
        ("a.txt", "a b c\n", "holds no rows of numbers"),
        ("a.txt", "1,2,nan\n", "coordinates that are no numbers"),
        ("a.npy", "no array", "holds no rows of numbers"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        read_cloud(tmp_path / name, 10, np.random.default_rng(0))
    assert str(tmp_path / name) in str(caught.value)


def test_arrays_of_something_else_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "words.npy", np.array([["a", "b", "c"]]))
    np.savez(tmp_path / "archive.npz", a=np.zeros((3, 3)))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name, found in (("words", "<U1 entries"), ("archive", "an archive of arrays")):
        with pytest.raises(DataError, match=rf"{name}.npy holds {found}, not one array of numbers; save the points"):
            read_cloud(tmp_path / f"{name}.npy", 10, np.random.default_rng(0))


def clouds(folder: Path, count: int, *, kind: str = "npy", columns: int = 3) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(len(str(folder)))
    for number in range(count):
        points = random.normal(size=(30, columns)).astype(np.float32)
        if kind == "npy":
            np.save(folder / f"{number}.npy", points)
        else:
            np.savetxt(folder / f"{number}.txt", points, delimiter="," if kind == "csv" else " ")


@pytest.mark.parametrize("layout", ["split/class", "class/split", "class"])
def test_folders_by_class_in_three_layouts(tmp_path: Path, layout: str) -> None:
    for name, kind, columns in (("chair", "npy", 3), ("lamp", "csv", 6), ("table", "txt", 3)):
        if layout == "class":
            clouds(tmp_path / name, 5, kind=kind, columns=columns)
        else:
            for split, count in (("train", 4), ("test", 1)):
                inner = (split, name) if layout == "split/class" else (name, split)
                clouds(tmp_path.joinpath(*inner), count, kind=kind, columns=columns)
    data = PointFilesData(root=str(tmp_path), num_classes=3, num_points=40, batch_size=12)
    data.setup("fit")
    assert data.classes == ["chair", "lamp", "table"]
    points, labels = next(iter(data.train_dataloader()))
    assert points.shape == (12, 40, 3)
    assert points.dtype == torch.float32
    assert torch.bincount(labels).tolist() == [4, 4, 4]
    again, val_labels = next(iter(data.val_dataloader()))
    assert val_labels.tolist() == [0, 1, 2]
    assert torch.equal(again, next(iter(data.val_dataloader()))[0]), "validation shows other points each time"
    torch.testing.assert_close(again.norm(dim=2).amax(dim=1), torch.ones(3))
    torch.manual_seed(0)
    first = data.train_set[0][0]
    assert not torch.equal(first, data.train_set[0][0])
    torch.manual_seed(0)
    assert torch.equal(first, data.train_set[0][0]), "torch's generator does not decide"


def test_augmentation_keeps_heights() -> None:
    points = in_unit_ball(torch.randn(50, 3))
    for axis in range(3):
        turned = points @ turns(torch.tensor([1.3]), axis=axis)[0]
        torch.testing.assert_close(turned[:, axis], points[:, axis])
        torch.testing.assert_close(turned.norm(dim=1), points.norm(dim=1))
        assert not torch.allclose(turned, points)


def test_bad_folders_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data=point_files reads files from disk; set data.root"):
        PointFilesData(root=None, num_classes=2)
    clouds(tmp_path / "two" / "a", 2)
    clouds(tmp_path / "two" / "b", 2)
    with pytest.raises(DataError, match=r"has 2 classes, data.num_classes is 3; set data.num_classes=2"):
        PointFilesData(root=str(tmp_path / "two"), num_classes=3)
    clouds(tmp_path / "lone" / "a", 1)
    with pytest.raises(DataError, match=r"no file left for validation"):
        PointFilesData(root=str(tmp_path / "lone"), num_classes=2)
    clouds(tmp_path / "half" / "train" / "a", 2)
    with pytest.raises(DataError, match=r"has train/ but no test/ folder"):
        PointFilesData(root=str(tmp_path / "half"), num_classes=2)
    clouds(tmp_path / "half" / "test" / "b", 2)
    with pytest.raises(DataError, match=r"test/b is a class that .*train does not have"):
        PointFilesData(root=str(tmp_path / "half"), num_classes=2)
    (tmp_path / "hollow" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"hollow/a holds no points \(looked for .off"):
        PointFilesData(root=str(tmp_path / "hollow"), num_classes=2)
    with pytest.raises(ConfigError, match=r"data.num_classes=3, but there are 8 shapes"):
        ShapesData(num_classes=3)
    with pytest.raises(ConfigError, match=r"data.val_fraction=1"):
        PointFilesData(root=str(tmp_path / "two"), num_classes=2, val_fraction=1)
    for settings in ({"optimizer": "magic"}, {"dropout": 1.0}, {"width": 0.0}, {"lr": -1.0}):
        with pytest.raises(ConfigError, match=rf"recipe.{next(iter(settings))}="):
            PointClassifier(8, **settings)  # type: ignore[arg-type]
