#include "embedding_bag/cpu/sort.h"

#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/cpu/radix_sort.h"

namespace rec_kernels {
namespace {

// Minimum occurrences of a table that several threads sort: the barriers cost more for a smaller one.
constexpr int64_t kMinParallelEntries = 32768;

bool same_table(const Part& a, const Part& b) {
  return a.row_offset == b.row_offset && a.weight_offset == b.weight_offset && a.num_embeddings == b.num_embeddings &&
         a.embedding_dim == b.embedding_dim && a.format == b.format && a.shard == b.shard;
}

// The parts that read a table, and its range of sort entries.
struct Table {
  int64_t first, last;  // range of Plan::parts
  int64_t begin, count;
};

// Parts ordered by the linear rows of their tables, and the tables.
struct Plan {
  std::vector<int64_t> parts;
  std::vector<Table> tables;
};

Plan plan_tables(const BagInput& in) {
  Plan plan;
  int64_t entry = 0;
  for (int64_t i = 0; i < in.bags.num_parts; ++i) {
    const int64_t p = in.records ? in.records[i].by_row : i, f = in.parts[p].feature;
    plan.parts.push_back(p);
    if (i == 0 || !same_table(in.parts[p], in.parts[plan.parts[static_cast<size_t>(i - 1)]]))
      plan.tables.push_back({i, i, entry, 0});
    Table& table = plan.tables.back();
    const int64_t count =
        in.parts[p].frozen ? 0 : in.bags.offset(in.bags.first_bag(f + 1)) - in.bags.offset(in.bags.first_bag(f));
    table.last = i + 1;
    table.count += count;
    entry += count;
  }
  return plan;
}

// Writes the entries of one table at a time, sorts them and finds their runs.
class TableSorter {
 public:
  TableSorter(const BagInput& in, const Plan& plan, Occurrences* out) : in_(in), plan_(plan), out_(*out) {
    out_.entries = Scratch<uint64_t>(out_.count);
    out_.other = Scratch<uint64_t>(out_.count + static_cast<int64_t>(plan.tables.size()));
    base_ = in.bags.num_bags ? in.bags.offset(0) : 0;
  }

  // Returns the first bad position.
  int64_t sort(int64_t number, int64_t workers) const {
    const Table& table = plan_.tables[static_cast<size_t>(number)];
    const Part& first = part(table.first);
    const RowSort sort(table.count, bit_width(static_cast<uint64_t>(first.num_embeddings)), out_.payload_bits);
    uint64_t *sorted = out_.entries.get() + table.begin, *other = out_.other.get() + table.begin + number;
    Bounds bounds;
    write(table, sort.first_buffer(sorted, other), workers, &bounds);
    if (bounds.position < 0) return bounds.position;  // bad offset: the entries are invalid
    sort.sort(sorted, other, workers);
    TableRuns& runs = out_.tables[static_cast<size_t>(number)];
    auto* starts = reinterpret_cast<int64_t*>(other);  // one element more than entries
    runs.part = &first;
    runs.starts = starts;
    runs.first_bag = in_.bags.first_bag(first.feature);
    runs.num_bags = in_.bags.first_bag(first.feature + 1) - runs.first_bag;
    for (int64_t place = table.first; place < table.last; ++place)
      runs.multiplied = runs.multiplied || part(place).combine == Combine::kMult;
    if (runs.multiplied && table.last - table.first == 1) runs.other = only_other(first);
    runs.num_runs = find_runs(sorted, table.count - bounds.skipped, out_.payload_bits, table.begin, starts, workers);
    return bounds.position;
  }

 private:
  // The other part of a feature of two parts if it is float32, else null.
  const Part* only_other(const Part& f) const {
    const Part* parts = in_.parts.get() + in_.bags.first_part(f.feature);
    if (in_.bags.first_part(f.feature + 1) - in_.bags.first_part(f.feature) != 2) return nullptr;
    const Part& other = parts[parts == &f ? 1 : 0];
    return other.format == RowFormat::kFp32 ? &other : nullptr;
  }
  const Part& part(int64_t place) const { return in_.parts[plan_.parts[static_cast<size_t>(place)]]; }

  void write(const Table& table, uint64_t* entries, int64_t workers, Bounds* all) const {
    for (int64_t place = table.first; place < table.last; ++place) {
      const int64_t f = part(place).feature, first_bag = in_.bags.first_bag(f);
      const int64_t B = in_.bags.first_bag(f + 1) - first_bag;
      if (part(place).frozen) {
        all->position = std::min(all->position, in_.bags.bad_offset(first_bag, first_bag + B));
        continue;
      }
      const int64_t first = in_.bags.offset(first_bag), last = in_.bags.offset(first_bag + B);
      std::vector<Bounds> bounds(static_cast<size_t>(workers));
      parallel_pieces(B, ceil_div(B, 8 * workers), workers, [&](int64_t begin, int64_t end, int64_t worker) {
        write_bags(first_bag + begin, first_bag + end, part(place), {entries, first, last},
                   &bounds[static_cast<size_t>(worker)]);
      });
      for (const Bounds& b : bounds) {
        all->position = std::min(all->position, b.position);
        all->skipped += b.skipped;
      }
      entries += last - first;
    }
  }

  // Destination of a feature's entries: the entry of position i in [first, last) is at[i - first].
  struct Destination {
    uint64_t* at;
    int64_t first, last;
  };

  void write_bags(int64_t begin, int64_t end, const Part& f, Destination entries, Bounds* bounds) const {
    // Offsets determine where entries are written, so they must stay within the feature's range.
    const bool inside = in_.bags.offset(begin) >= entries.first && in_.bags.offset(end) <= entries.last;
    const int64_t bad_offset = inside ? in_.bags.bad_offset(begin, end) : -1 - begin;
    if (bad_offset != kNoBadPosition) {
      bounds->position = std::min(bounds->position, bad_offset);
      return;
    }
    // Only for the first part: another thread may process another part of the feature.
    if (out_.bag_of && &f == in_.parts.get() + in_.bags.first_part(f.feature)) {
      write_bags_of_ids(begin, end);
      if (out_.coefficients) write_coefficients(begin, end, f);
    }
    if (in_.bags.ids64) write_entries(static_cast<const int64_t*>(in_.bags.ids), begin, end, f, entries, bounds);
    else write_entries(static_cast<const int32_t*>(in_.bags.ids), begin, end, f, entries, bounds);
  }

  template <class Id>
  void write_entries(const Id* ids, int64_t begin, int64_t end, const Part& part, Destination entries,
                     Bounds* bounds) const {
    if (!part.partitioned) return write_rows(ids, begin, end, part, entries, bounds, [](int64_t id) { return id; });
    const Part f = part;
    write_rows(ids, begin, end, part, entries, bounds, [f](int64_t id) { return f.row(id); });
  }

  // row(id) is less than num_embeddings, the row of skipped ids, which therefore sort last.
  template <class Id, class Row>
  void write_rows(const Id* ids, int64_t begin, int64_t end, const Part& f, Destination entries, Bounds* bounds,
                  const Row& row) const {
    const Bags bags = in_.bags;  // copies, which the stores below cannot alias
    const int64_t limit = f.id_limit, padding = bags.padding_of(f), rows = f.num_embeddings;
    const int64_t base = base_;
    const int bits = out_.payload_bits;
    const bool by_bag = !out_.bag_of, check = bags.check_ids;
    Bounds found = *bounds;
    for (int64_t bag = begin, start = bags.offset(begin); bag < end; ++bag) {
      const int64_t stop = bags.offset(bag + 1);
      for (int64_t i = start; i < stop; ++i) {
        const int64_t id = static_cast<int64_t>(ids[i]);
        const bool in_range = !check || static_cast<uint64_t>(id) < static_cast<uint64_t>(limit);
        int64_t key = rows;
        if (__builtin_expect(in_range && id != padding, 1)) {
          key = row(id);
        } else {
          if (!in_range) found.position = std::min(found.position, i);
          ++found.skipped;
        }
        entries.at[i - entries.first] =
            static_cast<uint64_t>(key) << bits | static_cast<uint64_t>(by_bag ? bag : i - base);
      }
      start = stop;
    }
    *bounds = found;
  }

  void write_bags_of_ids(int64_t begin, int64_t end) const {
    for (int64_t bag = begin; bag < end; ++bag)
      for (int64_t i = in_.bags.offset(bag); i < in_.bags.offset(bag + 1); ++i)
        out_.bag_of[i - base_] = static_cast<uint32_t>(bag);
  }

  void write_coefficients(int64_t begin, int64_t end, const Part& f) const {
    const Bags& bags = in_.bags;
    const int64_t padding = bags.padding_of(f);
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t start = bags.offset(bag), stop = bags.offset(bag + 1);
      int64_t counted = 0;
      for (int64_t i = start; i < stop; ++i) {
        const int64_t id = bags.id(i);
        counted += bags.counts(id, f, padding);
      }
      const float each = f.mean && counted ? 1.0f / static_cast<float>(counted) : 1.0f;
      for (int64_t i = start; i < stop; ++i)
        out_.coefficients[i - base_] = bags.per_sample_weights ? bags.per_sample_weights[i] * each : each;
    }
  }

  const BagInput& in_;
  const Plan& plan_;
  Occurrences& out_;
  int64_t base_;
};

// Chooses the payload of entries: the bag, or the id's position where coefficients or products need it. `ids`: their
// number in all bags.
void choose_payload(const BagInput& in, int64_t ids, Occurrences* out) {
  bool weighted = in.bags.per_sample_weights != nullptr, multiplied = false;
  int64_t most_rows = 0;
  for (int64_t p = 0; p < in.bags.num_parts; ++p) {
    weighted = weighted || in.parts[p].mean;
    multiplied = multiplied || in.parts[p].combine == Combine::kMult;
    most_rows = std::max(most_rows, in.parts[p].num_embeddings);
  }
  const bool by_id = weighted || multiplied;
  const int64_t payloads = std::max(by_id ? ids : in.bags.num_bags, int64_t{1});
  out->payload_bits = bit_width(static_cast<uint64_t>(payloads));
  check_value(out->payload_bits + bit_width(static_cast<uint64_t>(most_rows)) <= 64, "too many rows (", most_rows,
              ") and ids (", ids, ") for one call: their numbers must fit in 64 bits together");
  if (by_id) out->bag_of = Scratch<uint32_t>(ids);
  if (weighted) out->coefficients = Scratch<float>(ids);
}

// Tables with more than a thread's share of the occurrences are sorted by all threads, one after the other. The rest is
// sorted by one thread per table, largest first.
int64_t sort_tables(const Plan& plan, int64_t count, const TableSorter& sorter) {
  std::vector<int64_t> order(plan.tables.size());
  for (size_t t = 0; t < order.size(); ++t) order[t] = static_cast<int64_t>(t);
  const auto size = [&](int64_t t) { return plan.tables[static_cast<size_t>(t)].count; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });

  const int64_t workers = workers_for(count, kMinParallelEntries / 4), tables = static_cast<int64_t>(order.size());
  int64_t bad = kNoBadPosition, together = 0;
  for (; workers > 1 && together < tables; ++together) {
    const int64_t t = order[static_cast<size_t>(together)];
    if (size(t) < kMinParallelEntries || size(t) * workers <= count) break;
    bad = std::min(bad, sorter.sort(t, workers));
  }
  std::vector<int64_t> found(static_cast<size_t>(workers), kNoBadPosition);
  const int64_t alone = tables - together;
  parallel_pieces(alone, 1, std::min(workers, std::max(alone, int64_t{1})), [&](int64_t i, int64_t, int64_t worker) {
    int64_t& first = found[static_cast<size_t>(worker)];
    first = std::min(first, sorter.sort(order[static_cast<size_t>(together + i)], 1));
  });
  return std::min(bad, *std::min_element(found.begin(), found.end()));
}

// Returns -1 - i if the first or last offset of feature f, offsets[i], is out of range or they are not in order, else
// kNoBadPosition. Offsets in between are checked where they are read.
int64_t bad_boundary(const Bags& bags, int64_t f) {
  const int64_t first = bags.first_bag(f), last = bags.first_bag(f + 1);
  const int64_t start = bags.offset(first), stop = bags.offset(last);
  if (start < 0 || start > bags.num_ids) return -1 - first;
  return stop < start || stop > bags.num_ids ? -1 - last : kNoBadPosition;
}

}  // namespace

Occurrences sort_occurrences(const BagInput& in, const Tensor& grad) {
  Bounds bounds;
  for (int64_t f = 0; f < in.bags.num_features && bounds.position == kNoBadPosition; ++f)
    bounds.position = bad_boundary(in.bags, f);
  in.raise(bounds);
  Occurrences out;
  const Plan plan = plan_tables(in);
  for (const Table& t : plan.tables) out.count += t.count;
  choose_payload(in, in.bags.num_bags ? in.bags.offset(in.bags.num_bags) - in.bags.offset(0) : 0, &out);
  out.tables.resize(plan.tables.size());
  bounds.position = sort_tables(plan, out.count, TableSorter(in, plan, &out));
  in.raise(bounds);
  out.part_tables.resize(static_cast<size_t>(in.bags.num_parts));
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    TableRuns& table = out.tables[t];
    const Part& f = *table.part;
    if (table.num_bags > 0)
      table.gradients =
          in.bags.row_of(table.first_bag, f.feature, grad.const_data_ptr<float>(), in.output_dim) + f.output_offset;
    table.first_run = out.num_runs;
    table.first_float = out.num_floats;
    out.num_runs += table.num_runs;
    out.num_floats += table.num_runs * f.embedding_dim;
    for (int64_t i = plan.tables[t].first; i < plan.tables[t].last; ++i)
      out.part_tables[static_cast<size_t>(plan.parts[static_cast<size_t>(i)])] = static_cast<int64_t>(t);
  }
  return out;
}

}  // namespace rec_kernels
