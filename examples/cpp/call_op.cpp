// Ops of rec_kernels, called from C++ by name:
//
//     call_op .../rec_kernels/librec_kernels_cpu.so [tables.pt]
//
// Looks up bags of ids in one table and averages them, then shows the error for an id out of range. With tables.pt,
// written by save_tables.py, one call also looks up bags in several tables.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

#include "load_library.h"

using Arguments = std::map<std::string, c10::IValue>;

// Calls an overload of an op with arguments by name, as Python does; the schema has the defaults of the others. Code
// here stays valid when later versions add arguments, because these always have defaults.
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

// Loads a tuple of tensors written by Python's torch.save.
std::vector<at::Tensor> load_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue tuple = torch::jit::pickle_load(bytes);
  for (const c10::IValue& element : tuple.toTupleRef().elements()) tensors.push_back(element.toTensor());
  return tensors;
}

// A layout is a tensor and a list of integers. Only rk.table_layout, in Python, creates them; C++ passes them on.
void look_up_in_tables(const char* path) {
  const std::vector<at::Tensor> loaded = load_tensors(path);
  const at::Tensor &weights = loaded.at(0), &layout = loaded.at(1), &sizes = loaded.at(2);
  const int64_t* first = sizes.const_data_ptr<int64_t>();
  const std::vector<int64_t> layout_sizes(first, first + sizes.numel());
  const at::Tensor values = at::tensor({3, 1, 4, 1, 5, 9}, at::kLong);
  const at::Tensor offsets = at::tensor({0, 2, 2, 6, 6}, at::kLong);  // two bags for each of two features
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
  const at::Tensor values = at::tensor({3, 1, 4, 1, 5, 9}, at::kLong);         // ids of consecutive bags
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
