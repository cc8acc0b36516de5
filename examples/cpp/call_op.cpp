// Ops of rec_kernels, called from C++ by name:
//
//     call_op .../rec_kernels/librec_kernels_cpu.so [tables.pt]
//
// Bags of ids are looked up in one table and averaged; then an id that the table does not have shows an error. With
// tables.pt, which save_tables.py writes, the same bags are looked up in several tables by one call.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

#include "load_library.h"

using Arguments = std::map<std::string, c10::IValue>;

// Calls an overload of an op with arguments by name, as Python does: the schema has the others' defaults. New arguments
// of a later version, which always have one, do not ask for new code here.
torch::jit::Stack call(const std::string& name, const std::string& overload, const Arguments& given) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("rec_kernels::" + name).c_str(), overload.c_str());
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    TORCH_CHECK(found != given.end() || argument.default_value(), name, " needs ", argument.name());
    stack.push_back(found != given.end() ? found->second : *argument.default_value());
  }
  op.callBoxed(stack);
  return stack;
}

// A tuple of tensors that Python's torch.save has written.
std::vector<at::Tensor> load_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue tuple = torch::jit::pickle_load(bytes);
  for (const c10::IValue& element : tuple.toTupleRef().elements()) tensors.push_back(element.toTensor());
  return tensors;
}

// A layout is a tensor and a list of numbers. rk.table_layout makes both, in Python; a program takes them as they are.
void look_up_in_tables(const char* path) {
  const std::vector<at::Tensor> loaded = load_tensors(path);
  const at::Tensor &weights = loaded.at(0), &layout = loaded.at(1), &sizes = loaded.at(2);
  const int64_t* first = sizes.const_data_ptr<int64_t>();
  const std::vector<int64_t> layout_sizes(first, first + sizes.numel());
  const at::Tensor values = at::tensor({3, 1, 4, 1, 5, 9}, at::kLong);
  const at::Tensor offsets = at::tensor({0, 2, 2, 6, 6}, at::kLong);  // two bags of a feature, two of another
  const Arguments arguments = {{"weights", weights},
                               {"values", values},
                               {"offsets", offsets},
                               {"layout", layout},
                               {"layout_sizes", layout_sizes}};
  std::cout << call("embedding_bag", "layout", arguments)[0].toTensor() << "\n";
}

int main(int argc, char** argv) try {
  if (argc != 2 && argc != 3) {
    std::cerr << "usage: call_op path/to/librec_kernels_cpu.so [tables.pt]\n";
    return 2;
  }
  load_library(argv[1]);
  const at::Tensor weights = at::arange(40, at::kFloat).div(8).view({10, 4});  // 10 rows of 4 columns
  const at::Tensor values = at::tensor({3, 1, 4, 1, 5, 9}, at::kLong);         // ids of all bags, one after the other
  const at::Tensor offsets = at::tensor({0, 2, 2, 6}, at::kLong);              // three bags: 2 ids, none, 4 ids
  Arguments arguments = {{"weights", weights}, {"values", values}, {"offsets", offsets}, {"pooling", "mean"}};
  const torch::jit::Stack results = call("embedding_bag", "table", arguments);
  std::cout << results[0].toTensor() << "\n";

  arguments["values"] = values + 6;
  try {
    call("embedding_bag", "table", arguments);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::cout << text.substr(0, text.find('\n')) << "\n";
  }
  if (argc == 3) look_up_in_tables(argv[2]);
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
