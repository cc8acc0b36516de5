#include "embedding_bag/cpu/input.h"

#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/first_bad.h"

namespace rec_kernels {
namespace {

// True if part i is the only part of its feature.
bool is_only_part(const Layout& layout, int64_t i) {
  const int64_t f = layout.parts[i].feature;
  return part_start(layout.parts, f + 1, layout.sizes, layout.num_parts) - layout.parts[f].part_start == 1;
}

// Checks all records and converts them. `own_rows`: every bag has an output row, in which columns start at 0.
std::unique_ptr<Part[]> read_parts(const Layout& layout, const LayoutLimits& limits, bool own_rows) {
  std::unique_ptr<Part[]> parts(new Part[static_cast<size_t>(layout.num_parts)]);
  for (int64_t i = 0; i < layout.num_parts; ++i) {
    const LayoutFault fault = fault_of(layout.parts, i, layout.sizes, limits);
    if (fault != LayoutFault::kNone) throw_layout_fault(layout, limits, i, fault);
  }
  for (int64_t i = 0; i < layout.num_parts; ++i) {
    parts[i] = Part::of(layout.parts[i], is_only_part(layout, i));
    if (own_rows) parts[i].output_offset = layout.parts[i].part_column;
  }
  return parts;
}

void check_bag_starts(const Bags& b) {
  const int64_t* starts = b.starts;
  check_value(starts[0] == 0, "bag_starts[0] = ", starts[0], " must be 0");
  for (int64_t f = 1; f <= b.num_features; ++f)
    check_value(starts[f] >= starts[f - 1], "bag_starts[", f, "] = ", starts[f], " is below the one before it, ",
                starts[f - 1]);
  check_value(starts[b.num_features] == b.num_bags, "bag_starts[", b.num_features, "] = ", starts[b.num_features],
              " must be ", b.num_bags, ", the number of bags that offsets describe");
}

// Checks bag counts of all features, and the inverse of those in groups.
void check_shared_bags(const BagInput& in) {
  const Bags& b = in.bags;
  std::vector<int64_t> first_of(static_cast<size_t>(in.inverse->size(0)), -1);
  const auto count = [&](int64_t f) { return b.starts[f + 1] - b.starts[f]; };
  for (int64_t f = 0; f < b.num_features; ++f) {
    const int64_t group = b.groups[f];
    if (group < 0) {
      check_value(count(f) == b.batch, "bag_starts: feature ", f, " has ", count(f), " bags, and must have ", b.batch,
                  ", one for each sample of inverse: it is in no group");
      continue;
    }
    int64_t& first = first_of[static_cast<size_t>(group)];
    check_value(count(f) <= b.batch, "bag_starts: feature ", f, " has ", count(f), " bags, and inverse only ", b.batch,
                " samples that could have them");
    check_value(first < 0 || count(f) == count(first), "bag_starts: feature ", f, " has ", count(f), " bags, and must ",
                "have as many as feature ", first, ", ", first < 0 ? 0 : count(first), ": both are in group ", group);
    if (first < 0) first = f;
  }
  const auto* inverse = in.inverse->const_data_ptr<int64_t>();
  for (size_t g = 0; g < first_of.size(); ++g) {
    if (first_of[g] < 0) continue;
    const int64_t* indices = inverse + static_cast<int64_t>(g) * b.batch;
    const int64_t limit = count(first_of[g]);
    const int64_t i = first_bad(b.batch, [indices, limit](int64_t at) { return is_outside(indices[at], limit); });
    if (i != kNoBadPosition)
      throw std::out_of_range(join("inverse[", g, ", ", i, "] = ", indices[i], " is out of range: it must be in [0, ",
                                   limit, "), the bags of feature ", first_of[g], ", which is in group ", g));
  }
}

// Checks the only offset of a call without bags, which no kernel reads.
void check_only_offset(const BagInput& in) {
  if (in.bags.num_bags > 0) return;
  Bounds bounds;
  bounds.position = in.bags.bad_offset(0, 0);
  in.raise(bounds);
}

// Copies all ids, with those of hashed features replaced by TablePart::hashed_row().
Scratch<int64_t> map_hashed_ids(const BagInput& in) {
  const Bags& bags = in.bags;
  Scratch<int64_t> mapped(bags.num_ids);
  int64_t* out = mapped.get();
  const auto for_ids = [](int64_t count, const auto& body) {
    parallel_pieces(count, kFewItems, workers_for(count, kFewItems), [&](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  };
  for_ids(bags.num_ids, [&](int64_t i) { out[i] = bags.id(i); });
  for (int64_t f = 0; f < in.bags.num_features; ++f) {
    const TablePart table = in.records[bags.first_part(f)];
    if (!table.takes_every_id()) continue;
    // Bad offsets would make kernels read ids that were not mapped.
    Bounds bounds;
    bounds.position = bags.bad_offset(bags.first_bag(f), bags.first_bag(f + 1));
    in.raise(bounds);
    const int64_t first = bags.offset(bags.first_bag(f)), last = bags.offset(bags.first_bag(f + 1));
    const Divisor modulus = Divisor::of(table.modulus);
    for_ids(last - first,
            [&](int64_t i) { out[first + i] = table.hashed_row(out[first + i], modulus, table.modulus); });
  }
  return mapped;
}

}  // namespace

BagInput read_bags(const BagArguments& bags, const Layout& layout, const LayoutLimits& limits) {
  BagInput in{check_bags(bags, layout), nullptr, layout.parts, layout.sizes.cache_ways, {}};
  in.parts = read_parts(layout, limits, in.bags.own_rows);
  if (in.bags.starts) check_bag_starts(in.bags);
  if (bags.groups) {
    in.bags.groups = bags.groups->data();
    check_shared_bags(in);
  }
  check_only_offset(in);
  if (layout.sizes.flags & kHashes) {
    in.mapped_ids = map_hashed_ids(in);
    in.bags.ids = in.mapped_ids.get();
    in.bags.ids64 = true;
  }
  return in;
}

BagInput read_bags(const OneTableBags& bags, const Part& table) {
  BagInput in{check_bags(bags, table), std::make_unique<Part[]>(1), nullptr, 0, {}};
  in.parts[0] = table;
  check_only_offset(in);
  return in;
}

void BagInput::raise(const Bounds& bounds) const {
  const int64_t position = bounds.position;
  if (position == kNoBadPosition) return;
  if (position < 0) {
    // Every worker stops at its own first bad offset; report the globally first one.
    const int64_t first = bags.bad_offset(0, bags.num_bags), i = -1 - first, bag = i > 0 ? i - 1 : 0;
    const int64_t feature = bags.num_bags ? bags.feature_of(bag) : 0;
    throw_bad_position(
        {first, feature, bag - bags.first_bag(feature), bags.offset(i), bags.num_ids, i > 0 ? bags.offset(i - 1) : 0});
  }
  if (!raises) return;
  // The last bag that starts at or before the position.
  const int64_t bag = first_behind(1, bags.num_bags, [&](int64_t i) { return bags.offset(i) > position; }) - 1;
  const int64_t feature = bags.feature_of(bag);
  throw_bad_position({position, feature, bag - bags.first_bag(feature), bags.id(position),
                      parts[bags.first_part(feature)].id_limit, 0});
}

}  // namespace rec_kernels
