// An op of rec_kernels, called from C++ by name:
//
//     call_op .../rec_kernels/librec_kernels_cpu.so
//
// Bags of ids are looked up in one table and averaged; then an id that the table does not have shows an error.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>
#include <map>

#include "load_library.h"

using Arguments = std::map<std::string, c10::IValue>;

// Calls an op with arguments by name, as Python does: the schema has the others' defaults. New arguments of a later
// version, which always have one, do not ask for new code here.
torch::jit::Stack call(const std::string& name, const Arguments& given) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("rec_kernels::" + name).c_str(), "");
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    TORCH_CHECK(found != given.end() || argument.default_value(), name, " needs ", argument.name());
    stack.push_back(found != given.end() ? found->second : *argument.default_value());
  }
  op.callBoxed(stack);
  return stack;
}

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: call_op path/to/librec_kernels_cpu.so\n";
    return 2;
  }
  load_library(argv[1]);
  const at::Tensor weights = at::arange(40, at::kFloat).div(8).view({10, 4});  // 10 rows of 4 columns
  const at::Tensor values = at::tensor({3, 1, 4, 1, 5, 9}, at::kLong);         // ids of all bags, one after the other
  const at::Tensor offsets = at::tensor({0, 2, 2, 6}, at::kLong);              // three bags: 2 ids, none, 4 ids
  Arguments arguments = {{"weights", weights}, {"values", values}, {"offsets", offsets}, {"pooling", "mean"}};
  const torch::jit::Stack results = call("embedding_bag", arguments);
  std::cout << results[0].toTensor() << "\n";

  arguments["values"] = values + 6;
  try {
    call("embedding_bag", arguments);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::cout << text.substr(0, text.find('\n')) << "\n";
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
