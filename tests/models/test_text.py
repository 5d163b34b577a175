"""The text, its vocabulary, and the windows that are cut from it."""

from pathlib import Path

import numpy as np
import pytest

from models import text


def test_default_text_is_on_every_machine() -> None:
    corpus = text.read()
    assert len(corpus) > 400_000
    assert "The" in corpus


def test_own_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("grüß Gott\n", encoding="utf-8")
    assert text.read(str(path)) == "grüß Gott\n"


def test_known_characters_survive_and_rare_ones_share_an_id() -> None:
    corpus = "aaaa bbbb cc ü 漢 \U0001f600"
    vocabulary = text.Vocabulary.of(corpus, size=4)
    assert vocabulary.characters == " ab"
    assert vocabulary.decode(vocabulary.encode("ab ba")) == "ab ba"
    assert vocabulary.encode("aü漢\U0001f600z").tolist() == [2, 0, 0, 0, 0]
    assert vocabulary.decode(np.array([0, 3])) == text.RARE + "b"


def test_ids_fit_a_vocabulary_that_is_larger_than_the_alphabet() -> None:
    vocabulary = text.Vocabulary.of("abc", size=257)
    ids = vocabulary.encode("abc")
    assert (ids.dtype, ids.tolist()) == (np.int32, [1, 2, 3])
    assert vocabulary.decode(np.array([1, 256])) == "a" + text.RARE


def test_whole_default_text_survives_its_alphabet() -> None:
    corpus = text.read()
    vocabulary = text.Vocabulary.of(corpus, size=len(set(corpus)) + 1)
    assert vocabulary.decode(vocabulary.encode(corpus)) == corpus


def test_vocabulary_needs_two_ids() -> None:
    with pytest.raises(ValueError, match="vocabulary of size 1: at least 2"):
        text.Vocabulary.of("abc", size=1)


def test_windows_are_pieces_of_the_text() -> None:
    tokens = np.arange(100, dtype=np.int32)
    cut = text.windows(tokens, batch=50, length=9, seed=(0, 1))
    assert cut.shape == (50, 9)
    np.testing.assert_array_equal(cut, cut[:, :1] + np.arange(9))
    np.testing.assert_array_equal(cut, text.windows(tokens, batch=50, length=9, seed=(0, 1)))
    assert (cut != text.windows(tokens, batch=50, length=9, seed=(0, 2))).any()


def test_the_last_window_is_reached() -> None:
    tokens = np.arange(4, dtype=np.int32)
    cut = text.windows(tokens, batch=50, length=3, seed=(0,))
    assert set(cut[:, 0]) == {0, 1}
    assert text.windows(tokens, batch=2, length=4, seed=(0,)).tolist() == [[0, 1, 2, 3]] * 2


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 characters has no window of 5: .* less --seq"):
        text.windows(np.arange(4, dtype=np.int32), batch=2, length=5, seed=(0,))
