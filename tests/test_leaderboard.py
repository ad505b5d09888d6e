"""What is printed of variants can be compared with their checkpoints."""

from pl_pipe.report.leaderboard import Leaderboard, Row


def test_the_last_value_is_told_beside_the_best() -> None:
    rows = [
        Row(0, {"lr": 0.1}, "trained", 66, 0.9521, 44, {"val_acc": 0.9421}),
        Row(1, {}, "waiting", 0, None, None, {}),
    ]
    first, second = str(Leaderboard.ranked(rows, monitor="val_acc", mode="max")).splitlines()
    assert first == "variant 0 (lr=0.1): val_acc 0.9521 after step 44, 0.9421 at the end, 66 steps, trained"
    assert second == "variant 1 (as given), 0 steps, waiting"
