"""The label rule on sequences short enough to write out by hand."""

import torch

from medusa_heads.training.loss.rows import head_labels, supervised_rows

X = -100


def test_head_i_predicts_token_t_plus_2_plus_i() -> None:
    labels_BT = torch.tensor([[10, 11, 12, 13, 14]])
    assert head_labels(labels_BT, 2).tolist() == [[[12, 13], [13, 14], [14, X], [X, X], [X, X]]]


def test_a_prompt_is_context_and_its_last_position_does_not_yet_draft() -> None:
    # Tokens 0-2 are the prompt. From t = 1 the next token (2) is still the prompt: never drafted
    # there. From t = 2 the next token (3) is generated, heads predict 4 and 5.
    labels_BT = torch.tensor([[X, X, X, 13, 14, 15]])
    rows = supervised_rows(labels_BT, labels_BT, 2)
    assert rows.positions_R.tolist() == [2, 3]
    assert rows.labels_RK.tolist() == [[14, 15], [15, X]]


def test_padding_on_the_right_is_never_a_label() -> None:
    labels_BT = torch.tensor([[20, 21, 22, 23], [30, 31, X, X]])
    rows = supervised_rows(labels_BT, labels_BT, 3)
    # The second row has no t with both t + 1 and t + 2 in the text.
    assert rows.positions_R.tolist() == [0, 1]
    assert rows.labels_RK.tolist() == [[22, 23, X], [23, X, X]]


def test_no_head_learns_across_text_that_was_not_generated() -> None:
    """Where an answer ends nothing is drafted, and so nothing of the next one either."""
    labels_BT = torch.tensor([[X, 11, 12, X, X, 15, 16, 17]])
    labels_TK = head_labels(labels_BT, 2)[0].tolist()
    assert labels_TK == [[12, X], [X, X], [X, X], [X, X], [16, 17], [17, X], [X, X], [X, X]]
    labels_TK = head_labels(labels_BT, 5)[0].tolist()
    assert labels_TK[:2] == [[12, X, X, X, X], [X] * 5] and labels_TK[4] == [16, 17, X, X, X]


def test_nothing_supervised_gives_no_rows() -> None:
    rows = supervised_rows(torch.zeros(2, 4).long(), torch.full((2, 4), X), 3)
    assert rows.positions_R.shape == (0,) and rows.labels_RK.shape == (0, 3)


def test_a_row_shorter_than_the_heads_reach() -> None:
    ids_BT = torch.tensor([[1, 2]])
    assert head_labels(ids_BT, 4).eq(X).all()
    assert head_labels(ids_BT, 4, torch.tensor([[0, 1]])).eq(X).all()


def test_sequential_heads_see_the_tokens_up_to_the_one_before_theirs() -> None:
    input_ids_BT = torch.tensor([[10, 11, 12, 13, 14]])
    rows = supervised_rows(input_ids_BT, input_ids_BT, 3)
    assert rows.positions_R.tolist() == [0, 1, 2]
    assert rows.tokens_RK.tolist() == [[11, 12, 13], [12, 13, 14], [13, 14, 0]]
    # Where head i has a label, the token before it is the last one that it sees.
    assert rows.labels_RK.tolist() == [[12, 13, 14], [13, 14, X], [14, X, X]]


def test_no_label_crosses_from_one_packed_document_into_the_next() -> None:
    ids_BT = torch.tensor([[10, 11, 12, 13, 20, 21, 22]])
    position_ids_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    labels_TK = head_labels(ids_BT, 2, position_ids_BT)[0].tolist()
    assert labels_TK == [[12, 13], [13, X], [X, X], [X, X], [22, X], [X, X], [X, X]]
    rows = supervised_rows(ids_BT, ids_BT, 2, position_ids_BT)
    assert rows.positions_R.tolist() == [0, 1, 4]
    assert rows.labels_RK.tolist() == [[12, 13], [13, X], [22, X]]
