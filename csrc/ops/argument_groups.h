// Ops have dozens of arguments, and what belongs together of them is one struct in C++. torch boxes a function by its
// parameters, one for each argument of the schema: flat<&f> is such a function, which fills the structs and calls f.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

namespace rec_kernels {

template <class... Ts>
struct Types {};

// The types of the arguments that a parameter stands for: its own; those of a group's members, in their order.
template <class Parameter>
struct ArgumentsOf {
  using types = Types<Parameter>;
};

namespace argument_groups {

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

// How many arguments come before parameter `at`.
template <class... Parameters>
constexpr size_t first_of(size_t at) {
  const size_t counts[] = {count(typename ArgumentsOf<Parameters>::types())...};
  size_t first = 0;
  for (size_t i = 0; i < at; ++i) first += counts[i];
  return first;
}

template <class Parameter, size_t First, class Arguments, size_t... K>
decltype(auto) take(const Arguments& all, std::index_sequence<K...>) {
  if constexpr (std::is_same_v<typename ArgumentsOf<Parameter>::types, Types<Parameter>>) return std::get<First>(all);
  else return std::decay_t<Parameter>{std::get<First + K>(all)...};
}

template <auto F, class Signature, class Arguments>
struct Flat;
template <auto F, class R, class... Parameters, class... Ts>
struct Flat<F, R (*)(Parameters...), Types<Ts...>> {
  static R call(Ts... arguments) { return gather(std::tie(arguments...), std::index_sequence_for<Parameters...>()); }

  template <class Arguments, size_t... I>
  static R gather(const Arguments& all, std::index_sequence<I...>) {
    return F(take<Parameters, first_of<Parameters...>(I)>(
        all, std::make_index_sequence<count(typename ArgumentsOf<Parameters>::types())>())...);
  }
};

template <auto F, class Signature>
struct Flattened;
template <auto F, class R, class... Parameters>
struct Flattened<F, R (*)(Parameters...)>
    : Flat<F, R (*)(Parameters...), typename Joined<typename ArgumentsOf<Parameters>::types...>::types> {};

}  // namespace argument_groups

template <auto F>
constexpr auto* flat = &argument_groups::Flattened<F, decltype(F)>::call;

}  // namespace rec_kernels
