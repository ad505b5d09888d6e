"""Override tokens survive quoting, and are told from flags."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from pl_pipe.cli.overrides import config_flags, override_key, quoted, with_free_names, without_outdated

# A path's characters; Hydra's own grammar has no way to write a ${ that is no interpolation.
PATHS = st.text(st.characters(codec="ascii", min_codepoint=32, exclude_characters="$"), min_size=1, max_size=30)


@given(PATHS)
def test_any_path_survives_quoting(path: str) -> None:
    parsed = OverridesParser.create().parse_override(quoted("ckpt_path", path))
    assert parsed.value() == path


def test_keys() -> None:
    assert [override_key(token) for token in ("a=1", "+a=1", "++a.b=1", "--cfg", "job", "--config-dir=x")] == [
        "a",
        "a",
        "a.b",
        None,
        None,
        None,
    ]


def test_config_flags_are_found_in_every_spelling() -> None:
    tokens = ["a=1", "--config-dir", "x", "-m", "--config-name=y", "-cd", "z"]
    assert config_flags(tokens) == ["--config-dir", "x", "--config-name=y", "-cd", "z"]


def test_another_choice_of_a_group_drops_the_settings_of_the_old_one() -> None:
    recorded = [
        "recipe=vgg16",
        "strategy=pipedream",
        "strategy.schedule=1f1b",
        "+strategy.extra=1",
        "trainer.devices=4",
    ]
    assert without_outdated(recorded, ["strategy=single"]) == ["recipe=vgg16", "trainer.devices=4"]
    assert without_outdated(recorded, ["strategy=pipedream", "trainer.devices=2"]) == recorded
    assert without_outdated(recorded[2:], ["strategy=single"]) == ["trainer.devices=4"]


def test_names_of_hyper_parameters_need_no_sign() -> None:
    given = ["strategy.variants.lr=[0.1,0.2]", "strategy.combine=zip", "+strategy.variants.wd=[1]", "-m"]
    assert with_free_names(given) == [f"++{given[0]}", *given[1:]]
