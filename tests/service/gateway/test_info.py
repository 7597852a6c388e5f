"""Descriptions of the model: values of config.json. test_servicer.py tests the others."""

from __future__ import annotations

import pytest

from npuserve.service.gateway import info


@pytest.mark.parametrize("value", [None, True, -1, 1 << 31, [], ["0"], 1.5])
def test_id_that_is_no_token_id_is_0(value: object) -> None:
    assert info._id(value) == 0


@pytest.mark.parametrize("value", [0, 7, (1 << 31) - 1])
def test_id_is_the_first_of_a_list(value: int) -> None:
    assert info._id(value) == info._id([value, 9]) == value
