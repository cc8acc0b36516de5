#include "core/schema.h"

#include <cstdint>
#include <map>

#include "core/received.h"

namespace rec_kernels {
namespace {

std::map<std::string, OpSchema>& noted() {
  static std::map<std::string, OpSchema> schemas;
  return schemas;
}

// "Tensor(a!)? sum=None" -> {"sum", written}.
ArgumentSchema read_argument(const std::string& text) {
  const size_t name = text.find(' ', text.find_first_not_of(' ')) + 1;
  return {text.substr(name, text.find('=', name) - name), text.substr(0, name).find('!') != std::string::npos};
}

// Memory range [begin, end) in bytes of a tensor's elements.
struct Reach {
  uintptr_t begin, end;
};

Reach reach(const Tensor& t, const char* name) {
  int64_t elements = 1, storage = 0, offset = 0;
  const Sizes sizes = t.sizes(), strides = t.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {0, 0};
    elements += (sizes[i] - 1) * strides[i];
  }
  check_call(aoti_torch_get_storage_size(t.get(), &storage), "aoti_torch_get_storage_size");
  check_call(aoti_torch_get_storage_offset(t.get(), &offset), "aoti_torch_get_storage_offset");
  const auto item = static_cast<int64_t>(t.element_size());
  const int64_t needed = (offset + elements) * item;
  if (needed > storage)  // build messages only on failure: formatting a shape is slow
    check_value(false, name, " of shape ", shape_of(t), " needs ", needed, " bytes of storage, which has ", storage,
                ": its memory has been freed, or made smaller (untyped_storage().resize_)");
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>(elements * item)};
}

}  // namespace

const char* noted_schema(const char* schema) {
  const std::string text(schema);
  const size_t open = text.find('('), close = text.rfind(") ->");
  OpSchema arguments;
  // Splits at commas, since no type or default of these ops contains one.
  for (size_t at = open + 1; at < close;) {
    const size_t end = std::min(text.find(',', at), close);
    arguments.push_back(read_argument(text.substr(at, end - at)));
    at = end + 2;
  }
  noted().emplace(text.substr(0, open), std::move(arguments));
  return schema;
}

const OpSchema& arguments_of(const char* op) { return noted().at(op); }

void check_memory(const OpSchema& schema, const Tensor* const* tensors) {
  std::vector<Reach> reaches(schema.size());
  bool writes = false;
  for (size_t i = 0; i < schema.size(); ++i) {
    if (tensors[i] != nullptr) reaches[i] = reach(*tensors[i], schema[i].name.c_str());
    writes |= schema[i].written;
  }
  if (!writes) return;
  for (size_t i = 0; i < schema.size(); ++i)
    for (size_t j = 0; schema[i].written && j < schema.size(); ++j)
      check_value(i == j || reaches[i].begin >= reaches[j].end || reaches[j].begin >= reaches[i].end, schema[i].name,
                  " overlaps with ", schema[j].name,
                  " in memory, and is written to: both must have memory of their own");
}

}  // namespace rec_kernels
