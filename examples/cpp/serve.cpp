// Runs a model compiled by export.py, without Python:
//
//     serve .../rec_kernels/librec_kernels_cpu.so model.pt2 inputs.pt outputs.pt
//
// inputs.pt is a tuple of tensors written by Python's torch.save; outputs.pt receives the model's first output, for
// torch.load.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>

#include "load_library.h"

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::cerr << "usage: serve path/to/librec_kernels_cpu.so model.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  load_library(argv[1]);  // before loading the model, which finds ops by name
  torch::inductor::AOTIModelPackageLoader model(argv[2]);

  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue tuple = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& input : tuple.toTupleRef().elements()) inputs.push_back(input.toTensor());

  const std::vector<at::Tensor> outputs = model.run(inputs);
  const std::vector<char> written = torch::jit::pickle_save(outputs.at(0));
  std::ofstream(argv[4], std::ios::binary).write(written.data(), static_cast<std::streamsize>(written.size()));

  std::cout << "scores in C++:   " << std::setprecision(9);  // enough digits to identify a float
  const at::Tensor scores = outputs.at(0).contiguous();
  for (int64_t i = 0; i < scores.numel(); ++i) std::cout << " " << scores.data_ptr<float>()[i];
  std::cout << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
