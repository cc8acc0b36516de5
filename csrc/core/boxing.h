// Boxed calling convention of torch: all arguments in one array, which also receives the results. implement<&f>(m,
// "op") registers f as the kernel of an op. torch's TORCH_BOX does the same with tuples, which for ops of 50 arguments
// take as long to compile as the ops themselves, and it leaks what core/received.h frees.
//
// Ops have dozens of arguments; related ones are grouped into structs, which are filled here.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "core/received.h"
#include "core/schema.h"
#include "core/stable.h"

namespace rec_kernels {

template <class... Ts>
struct Types {};

// Argument types of a C++ parameter: its own type, or the types of a struct's members in order.
template <class Parameter>
struct ArgumentsOf {
  using types = Types<Parameter>;
};

namespace boxing {

template <class... Lists>
struct Joined {
  using types = Types<>;
};
template <class... Ts>
struct Joined<Types<Ts...>> {
  using types = Types<Ts...>;
};
template <class... Ts, class... Us, class... Rest>
struct Joined<Types<Ts...>, Types<Us...>, Rest...> : Joined<Types<Ts..., Us...>, Rest...> {};

template <class... Ts>
constexpr size_t count(Types<Ts...>) {
  return sizeof...(Ts);
}

// Number of arguments before parameter `at`.
template <class... Parameters>
constexpr size_t first_of(size_t at) {
  const size_t counts[] = {count(typename ArgumentsOf<Parameters>::types())...};
  size_t first = 0;
  for (size_t i = 0; i < at; ++i) first += counts[i];
  return first;
}

// The I-th argument of a call: as received, then as a value. Bases are constructed in order, so that all arguments are
// received before any is converted.
template <size_t I, class T>
struct ReceivedAt {
  Received<T> received;
};
template <size_t I, class T>
struct Argument {
  T value;
};
template <size_t I, class T>
T& get(Argument<I, T>& argument) {
  return argument.value;
}

// Owns all arguments of a call.
template <class Places, class Ts>
struct Arguments;
template <size_t... I, class... Ts>
struct Arguments<std::index_sequence<I...>, Types<Ts...>> : ReceivedAt<I, std::decay_t<Ts>>...,
                                                            Argument<I, std::decay_t<Ts>>... {
  explicit Arguments(StableIValue* stack)
      : ReceivedAt<I, std::decay_t<Ts>>{Received<std::decay_t<Ts>>(stack[I])}...,
        Argument<I, std::decay_t<Ts>>{ReceivedAt<I, std::decay_t<Ts>>::received.take()}... {}
};

template <class Parameter, size_t First, class All, size_t... K>
decltype(auto) take(All& all, std::index_sequence<K...>) {
  if constexpr (std::is_same_v<typename ArgumentsOf<Parameter>::types, Types<Parameter>>) return get<First>(all);
  else return std::decay_t<Parameter>{get<First + K>(all)...};
}

template <class T>
void put(StableIValue* stack, const T& result) {
  stack[0] = torch::stable::detail::from(result);
}
template <class... Ts>
void put(StableIValue* stack, const std::tuple<Ts...>& results) {
  static_assert((std::is_same_v<Ts, Tensor> && ...));
  size_t done = 0;
  try {
    std::apply([&](const Ts&... each) { ((put(stack + done, each), ++done), ...); }, results);
  } catch (...) {  // torch ignores the results of a call that throws
    while (done > 0) Received<Tensor> dropped(stack[--done]);
    throw;
  }
}

// The tensor among an op's arguments that check_memory() looks at, or null. A list's tensors are views of another
// argument (embedding_bag_tables).
template <class T>
const Tensor* tensor_in(const T&) {
  return nullptr;
}
inline const Tensor* tensor_in(const Tensor& t) { return &t; }
inline const Tensor* tensor_in(const OptionalTensor& t) { return t ? &*t : nullptr; }

template <class R>
constexpr size_t kResults = 1;
template <>
inline constexpr size_t kResults<void> = 0;
template <class... Ts>
constexpr size_t kResults<std::tuple<Ts...>> = sizeof...(Ts);

inline void check_counts(uint64_t arguments, uint64_t in_function, uint64_t results, uint64_t of_function) {
  if (arguments != in_function || results != of_function)
    throw std::logic_error(join("the schema has ", static_cast<int64_t>(arguments), " arguments and ",
                                static_cast<int64_t>(results), " results, its kernel ",
                                static_cast<int64_t>(in_function), " and ", static_cast<int64_t>(of_function)));
}

template <auto F, class Signature>
struct Boxed;
template <auto F, class R, class... Parameters>
struct Boxed<F, R (*)(Parameters...)> {
  using Flat = typename Joined<typename ArgumentsOf<Parameters>::types...>::types;
  using Places = std::make_index_sequence<count(Flat())>;
  static inline const char* op = nullptr;

  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    check_counts(arguments, count(Flat()), results, kResults<R>);
    Arguments<Places, Flat> all(stack);
    check_memory_of(all, Places());
    const auto parameters = std::index_sequence_for<Parameters...>();
    if constexpr (std::is_void_v<R>) gather(all, parameters);
    else put(stack, gather(all, parameters));
  }

 private:
  template <class All, size_t... I>
  static void check_memory_of(All& all, std::index_sequence<I...>) {
    static const OpSchema& schema = arguments_of(op);
    const Tensor* const tensors[] = {tensor_in(get<I>(all))..., nullptr};
    check_memory(schema, tensors);
  }
  template <class All, size_t... I>
  static R gather(All& all, std::index_sequence<I...>) {
    return F(take<Parameters, first_of<Parameters...>(I)>(
        all, std::make_index_sequence<count(typename ArgumentsOf<Parameters>::types())>())...);
  }
};

}  // namespace boxing

template <auto F, class Library>
void implement(Library& m, const char* op) {
  using Kernel = boxing::Boxed<F, decltype(F)>;
  Kernel::op = op;
  m.impl(op, &Kernel::call);
}

}  // namespace rec_kernels
