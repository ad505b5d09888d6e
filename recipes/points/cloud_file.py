"""One file of points or of a mesh: `.off`, `.npy`, `.txt`, `.pts`. file -> *points on its surface* -> data set."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pl_pipe.errors import DataError

Floats = NDArray[np.float32]
SUFFIXES = (".off", ".npy", ".txt", ".pts")


@dataclass(frozen=True)
class Mesh:
    """Triangles in space."""

    vertices: Floats
    triangles: NDArray[np.int64]
    """Three numbers of vertices each."""


def read_cloud(path: Path, num_points: int, random: np.random.Generator) -> Floats:
    """`num_points` points of the file, [points, 3]: drawn on a mesh's surface, or chosen among those it lists."""
    if path.suffix.lower() == ".off":
        return surface_points(read_off(path), num_points, random)
    points = _read_points(path)
    # Where the file has too few, some stand twice: a cloud is a set, so nothing is added to it.
    chosen = random.choice(len(points), num_points, replace=len(points) < num_points)
    return points[chosen]


def surface_points(mesh: Mesh, num_points: int, random: np.random.Generator) -> Floats:
    """Points spread evenly over the surface: triangles by their area, then a place in the triangle."""
    corners = mesh.vertices[mesh.triangles].astype(np.float64)
    edge1, edge2 = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    areas = np.linalg.norm(np.cross(edge1, edge2), axis=1)
    total = areas.sum()
    if not np.isfinite(total) or total <= 0:
        return mesh.vertices[random.choice(len(mesh.vertices), num_points)]  # flat to a line: its corners are all
    chosen = random.choice(len(areas), num_points, p=areas / total)
    u, v = random.random((2, num_points, 1))
    beyond = u + v > 1
    u, v = np.where(beyond, 1 - u, u), np.where(beyond, 1 - v, v)
    found: Floats = (corners[chosen, 0] + u * edge1[chosen] + v * edge2[chosen]).astype(np.float32)
    return found


def read_off(path: Path) -> Mesh:
    """A mesh in Object File Format; ModelNet has files whose counts stand right behind the word OFF."""
    bare = (line.split("#", 1)[0].strip() for line in _text(path).splitlines())
    lines = [line for line in bare if line]
    if not lines or not lines[0].upper().startswith("OFF"):
        raise DataError(f"{path} does not begin with OFF, so it is no mesh in that format; remove or mend the file")
    lines = [lines[0][3:], *lines[1:]] if len(lines[0]) > 3 else lines[1:]
    try:
        num_vertices, num_faces = (int(word) for word in lines[0].split()[:2])
        vertices = _numbers(lines[1 : 1 + num_vertices]).astype(np.float32).reshape(num_vertices, 3)
        triangles = _triangles(lines[1 + num_vertices : 1 + num_vertices + num_faces], num_faces)
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is cut short or has something else than numbers ({error}); fetch it anew") from error
    if not num_vertices or not len(triangles):
        raise DataError(f"{path} has {num_vertices} vertices and {num_faces} faces, so no surface; remove the file")
    if triangles.min() < 0 or triangles.max() >= num_vertices:
        raise DataError(f"{path} has faces with vertices that it does not list ({num_vertices} there are); mend it")
    _check_finite(vertices, path)
    return Mesh(vertices, triangles)


def _triangles(lines: list[str], num_faces: int) -> NDArray[np.int64]:
    """Faces with more corners are cut into a fan; what follows the corners (colours) is not read."""
    if len(lines) < num_faces:
        raise IndexError(f"{num_faces} faces promised, {len(lines)} found")
    numbers = _numbers(lines)
    if len(numbers) == 4 * num_faces and (numbers[::4] == 3).all():
        return numbers.astype(np.int64).reshape(num_faces, 4)[:, 1:]
    found: list[tuple[int, int, int]] = []
    for line in lines:
        count, *corners = (int(word) for word in line.split() if "." not in word)
        if len(corners) < count:
            raise IndexError(f"a face of {count} corners has {len(corners)}")
        found += [(corners[0], corners[k], corners[k + 1]) for k in range(1, count - 1)]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _numbers(lines: list[str]) -> NDArray[np.float64]:
    """All numbers of the lines; quick, because a mesh has a hundred thousand."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # how numpy says that it met something else
        try:
            return np.fromstring(" ".join(lines), dtype=np.float64, sep=" ")
        except DeprecationWarning as warning:
            raise ValueError("no number") from warning


def _read_points(path: Path) -> Floats:
    """Rows that begin with x, y and z; further columns (normals, colours) are left out."""
    try:
        if path.suffix.lower() == ".npy":
            points = np.load(path, allow_pickle=False)
        else:
            text = _text(path)
            comma = "," in text.split("\n", 1)[0]
            points = np.loadtxt(text.splitlines(), delimiter="," if comma else None, ndmin=2, dtype=np.float32)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} holds no rows of numbers ({error}); remove or mend the file") from error
    if not isinstance(points, np.ndarray) or points.dtype.kind not in "fiu":
        kind = f"{points.dtype} entries" if isinstance(points, np.ndarray) else "an archive of arrays"
        raise DataError(f"{path} holds {kind}, not one array of numbers; save the points alone by numpy.save")
    if points.ndim != 2 or points.shape[1] < 3 or not len(points):
        raise DataError(f"{path} has the shape {points.shape}; points are rows of at least three numbers")
    found: Floats = points[:, :3].astype(np.float32)
    _check_finite(found, path)
    return found


def _check_finite(points: Floats, path: Path) -> None:
    if not np.isfinite(points).all():
        raise DataError(f"{path} has coordinates that are no numbers (NaN or infinite); remove or mend the file")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text ({error}); remove or mend the file") from error
