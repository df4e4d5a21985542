"""The committed task lists are what the engine says and the draw makes of it."""

from collections import Counter

import pytest
from make_scienceworld_tasks import draw_tests, engine_sizes, to_text

from epo_trl.envs import EnvError
from epo_trl.envs.scienceworld.tasks import FILE, HELD_OUT, TaskLists, all_task_types, find_task


def types_of(task_ids):
    return Counter(task_id.split("/")[1] for task_id in task_ids)


def variations_of(task_ids):
    return {tuple(task_id.split("/")[1:]) for task_id in task_ids}


@pytest.mark.games
@pytest.mark.slow
def test_the_committed_lists_are_drawn_from_the_variations_of_the_engine():
    sizes = engine_sizes()
    assert len(sizes) == 30 and [sum(part) for part in zip(*sizes.values(), strict=True)] == [3592, 1796, 1819]
    assert to_text(draw_tests(sizes)) == FILE.read_text(encoding="utf-8")


def test_the_splits_share_no_variation_and_the_held_out_types_are_nowhere_else():
    ids = TaskLists().ids
    seen = [variations_of(ids[split]) for split in ("train", "iid", "ood", "heldout")]
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert types_of(ids["heldout"]).keys() == set(HELD_OUT)
    assert types_of(ids["train"]).keys() == set(all_task_types()) - set(HELD_OUT) == types_of(ids["iid"]).keys()
    assert types_of(ids["ood"]).keys() == types_of(ids["iid"]).keys()


def test_training_draws_every_type_equally_often_and_every_variation_of_a_type_nearly():
    ids = TaskLists().ids["train"]
    assert set(types_of(ids).values()) == {692}  # the most variations that a type has
    assert len(set(types_of(ids[:250]).values())) == 1
    boil = Counter(task_id for task_id in ids if task_id.startswith("train/boil/"))
    assert len(boil) == 14 and max(boil.values()) - min(boil.values()) == 1


def test_test_lists_are_stratified_at_every_length():
    ids = TaskLists(n_iid=50, n_ood=25).ids
    assert {split: set(types_of(ids[split]).values()) for split in ("iid", "ood")} == {"iid": {2}, "ood": {1}}
    assert TaskLists().ids["iid"][:50] == ids["iid"]


def test_types_can_be_chosen():
    lists = TaskLists(task_types=("melt", "boil"), heldout_types=("freeze",))
    assert types_of(lists.ids["train"]).keys() == {"boil", "melt"}
    assert types_of(lists.ids["heldout"]).keys() == {"freeze"}
    assert TaskLists(task_types=HELD_OUT).ids.keys() == {"train", "iid", "ood"}
    many = TaskLists(task_types=("find-plant", "boil"), tests_per_type=60).ids
    assert types_of(many["iid"]) == {"find-plant": 60, "boil": 7}
    assert set(TaskLists(task_types=("find-plant", "boil")).ids["iid"]) < set(many["iid"])


def test_an_id_is_found_by_its_part_of_scienceworld():
    assert find_task("iid/boil/20") == ("boil", 20)
    assert find_task("ood/freeze/29") == ("freeze", 29)
    unknown = ("iid/boil/13", "train/boil/20", "heldout/boil/20", "boil/3", "train/boil", "train/boil/x", "")
    for wrong in (*unknown, "train/boil/00", "train/boil/٣", "train/boil/" + "9" * 5000):
        with pytest.raises(EnvError, match="task_id: .*got"):
            find_task(wrong)
