import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_core.strategies import cut_layouts, layouts, models

from crosscloud_trainer.layout import (
    HolderMap,
    Index,
    Interval,
    LayoutError,
    ReplicaLayout,
    contiguous_shard,
    split_shard,
)
from crosscloud_trainer.topology import own_cells, owners, peers


@given(models)
def test_cells_cover_each_element_of_each_parameter_once_and_never_span_two(model):
    index = Index.of(model)
    covered = {name: [] for name in model}
    for number in range(index.cells):
        name, start, stop = index.cell(number)
        assert 0 < stop - start <= 4096
        assert stop - start == index.cell_lengths[number]
        covered[name].extend(range(start, stop))
    assert covered == {name: list(range(count)) for name, count in model.items()}


@given(models)
def test_parameters_stand_in_byte_order_of_their_names(model):
    assert [p.name.encode() for p in Index.of(model).parameters] == sorted(name.encode() for name in model)


@given(models, models)
def test_digests_of_two_models_are_equal_where_their_cells_are(one, other):
    assert (Index.of(one).digest() == Index.of(other).digest()) == (Index.of(one) == Index.of(other))


def test_zero_1_and_2_cut_the_parameters_end_to_end_into_equal_pieces():
    index = Index.of({"b": 5, "a": 3})
    assert contiguous_shard(index, ["b", "a"], 6, 0) == (Interval(1, 0, 5, 0), Interval(0, 0, 1, 5))
    assert contiguous_shard(index, ["b", "a"], 6, 1) == (Interval(0, 1, 3, 0),)
    assert contiguous_shard(index, ["b", "a"], 6, 2) == ()


def test_zero_3_cuts_each_parameter_into_padded_pieces():
    index = Index.of({"a": 5, "b": 1})
    assert split_shard(index, ["a", "b"], 3, 0) == (Interval(0, 0, 2, 0), Interval(1, 0, 1, 2))
    assert split_shard(index, ["a", "b"], 3, 2) == (Interval(0, 4, 5, 0),)


@given(st.data())
def test_each_cell_has_one_holder_the_rank_with_its_first_element(data):
    layout = data.draw(layouts(data.draw(models)))
    first = {}
    for rank, shard in enumerate(layout.shards):
        for interval in shard:
            for element in range(-(-interval.start // 4096) * 4096, interval.stop, 4096):
                first[layout.index.cell_of(interval.parameter, element)] = rank
    assert layout.holders.ranks.tolist() == [first[cell] for cell in range(layout.index.cells)]
    held = [layout.holders.held(rank) for rank in range(layout.ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(layout.index.cells))


@given(st.data())
def test_pieces_bring_each_element_to_its_place_in_its_holder_once(data):
    layout = data.draw(layouts(data.draw(models)))
    index = layout.index
    numbers = [
        np.concatenate([np.arange(0)] + [index.first_elements[i.parameter] + np.arange(i.start, i.stop) for i in shard])
        for shard in layout.shards
    ]
    held = [np.full(int(index.lengths(layout.holders.held(r)).sum()), -1) for r in range(layout.ranks)]
    taken = [np.zeros(len(part), dtype=int) for part in numbers]
    for piece in layout.pieces:
        source = slice(piece.source_start, piece.source_start + piece.elements)
        target = slice(piece.holder_start, piece.holder_start + piece.elements)
        assert (held[piece.holder][target] == -1).all()
        held[piece.holder][target] = numbers[piece.source][source]
        taken[piece.source][source] += 1
    assert all((counts == 1).all() for counts in taken)
    for rank in range(layout.ranks):
        wanted = [np.arange(0)]
        for cell in layout.holders.held(rank).tolist():
            name, start, stop = index.cell(cell)
            wanted.append(index.first_elements[index.numbers[name]] + np.arange(start, stop))
        assert held[rank].tolist() == np.concatenate(wanted).tolist()


@given(st.data())
def test_a_rank_wants_the_result_of_exactly_the_foreign_cells_that_it_has_parts_of(data):
    layout = data.draw(layouts(data.draw(models)))
    for rank, shard in enumerate(layout.shards):
        touched = {layout.index.cell_of(i.parameter, element) for i in shard for element in range(i.start, i.stop)}
        wanted = {int(cell) for cells in layout.foreign_cells(rank).values() for cell in cells}
        assert wanted == touched - set(layout.holders.held(rank).tolist())
        for holder, cells in layout.foreign_cells(rank).items():
            assert (layout.holders.ranks[cells] == holder).all()


@given(st.data())
def test_holders_survive_the_way_through_a_handshake(data):
    layout = data.draw(layouts(data.draw(models)))
    runs = layout.holders.runs()
    assert HolderMap.from_runs(layout.index.cells, runs).ranks.tolist() == layout.holders.ranks.tolist()


@pytest.mark.parametrize("runs", [[(0, 0, 2), (1, 1, 3)], [(0, 0, 4)], [(-1, 0, 3)], [(0, 0, 0), (0, 0, 3)]])
def test_holders_of_cells_that_do_not_exist_or_come_twice_are_refused(runs):
    with pytest.raises(LayoutError, match="holders"):
        HolderMap.from_runs(3, runs)


@pytest.mark.parametrize("runs", [[], [(0, 0, 2)], [(0, 1, 3)]])
def test_holders_are_whole_only_when_each_cell_has_one(runs):
    assert not HolderMap.from_runs(3, runs).whole
    assert HolderMap.from_runs(3, [(0, 0, 2), (1, 2, 3)]).whole


def test_stages_tell_their_own_cells_and_join_to_the_whole():
    first, second = HolderMap.from_runs(4, [(0, 0, 1), (1, 1, 3)]), HolderMap.from_runs(4, [(0, 3, 4)]).shifted(2)
    joined = HolderMap.none(4).joined(first).joined(second)
    assert joined.ranks.tolist() == [0, 1, 1, 2]
    assert second.runs() == [(2, 3, 4)]
    with pytest.raises(LayoutError, match="cell 1 has two"):
        first.joined(HolderMap.from_runs(4, [(2, 1, 2)]))


@pytest.mark.parametrize(
    "shards",
    [
        ((Interval(0, 0, 9, 0),),),
        ((Interval(0, 0, 10, 0),), (Interval(0, 9, 10, 0),)),
        ((Interval(0, 0, 5, 0),), (Interval(0, 6, 10, 0),)),
        ((Interval(0, 0, 10, 0), Interval(1, 0, 1, 10)),),
    ],
)
def test_shards_that_leave_a_gap_or_overlap_are_refused(shards):
    with pytest.raises(LayoutError, match="shards"):
        ReplicaLayout(Index.of({"a": 10}), shards)


views = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)


@given(models, views)
def test_each_cell_has_one_owner_of_the_view_and_owners_differ_by_one_cell_at_most(model, view):
    index = Index.of(model)
    owner = owners(index, view)
    assert set(owner.tolist()) <= set(view)
    assert owner.tolist() == owners(index, sorted(view, reverse=True)).tolist()
    owned = [int(index.cell_lengths[owner == replica].sum()) for replica in view]
    assert max(owned) - min(owned) <= 4096


@given(st.data(), views)
def test_both_ends_agree_on_the_cells_and_each_reaches_its_owner_from_every_replica(data, view):
    model = data.draw(models)
    replicas = {replica: data.draw(cut_layouts(model, most_ranks=4)) for replica in view}
    index = Index.of(model)
    holders = {replica: layout.holders for replica, layout in replicas.items()}
    owner = owners(index, view)
    ends = [(replica, rank) for replica, layout in replicas.items() for rank in range(layout.ranks)]
    exchanged = {end: peers(index, view, holders, *end) for end in ends}
    arrived = {cell: [] for cell in range(index.cells)}
    for end in ends:
        for other, cells in exchanged[end].items():
            back = exchanged[other][end]
            assert back.send.tolist() == cells.receive.tolist()
            assert back.receive.tolist() == cells.send.tolist()
            for cell in cells.receive.tolist():
                assert owner[cell] == end[0]
                arrived[cell].append(other[0])
        for cell in own_cells(index, view, holders[end[0]], *end).tolist():
            arrived[cell].append(end[0])
    assert all(sorted(sources) == sorted(view) for sources in arrived.values())
