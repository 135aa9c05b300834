"""What is told of a run: the stories of ``testdata/board``, as ``tests.stories`` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories import Story, stories

STORIES = stories(Path(__file__).parent / "testdata" / "board")


@pytest.mark.parametrize("lines", STORIES.values(), ids=STORIES.keys())
def test_a_story_is_told_as_it_is_written(lines: list[str]) -> None:
    story = Story()
    for line in lines:
        try:
            story.tell(line)
        except AssertionError as error:
            raise AssertionError(f"{line}\n    {error}") from None
