// The kernels as torch operators of the CPU: checks what is cheap, before anything is touched.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "kernels.h"

namespace {

using at::Tensor;
using microtome::Unit;

struct Weight {
  const Tensor& packed;
  const std::optional<Tensor>& bias;
  int64_t outputs;
};

void check(const Tensor& x, const Weight& weight) {
  TORCH_CHECK(x.dim() >= 1 && weight.packed.scalar_type() == x.scalar_type() && weight.packed.is_contiguous(),
              "the packed weight is not a dense ", x.scalar_type(), " tensor");
  const int64_t inputs = x.size(-1), blocks = (weight.outputs + microtome::kBlock - 1) / microtome::kBlock;
  TORCH_CHECK(weight.packed.numel() == blocks * microtome::kBlock * inputs, "a weight of ", weight.packed.numel(),
              " elements does not take ", inputs, " inputs to ", weight.outputs, " outputs");
  const std::optional<Tensor>& bias = weight.bias;
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.outputs && bias->is_contiguous() &&
                        bias->scalar_type() == x.scalar_type()),
              "the bias is not a dense vector of ", weight.outputs);
}

int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Checks a call and lays it out; the layers' y are left to the caller.
template <size_t kCount>
std::array<microtome::Linear, kCount> lay_out(const Tensor& x, const Tensor& rows,
                                              const std::array<Weight, kCount>& weights, Unit unit) {
  const int64_t inputs = x.size(-1);
  if (x.scalar_type() == at::kFloat) {
    TORCH_CHECK(microtome::float32_served(), "this CPU has no unit for float32");
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 && unit != Unit::kNone, "this CPU has no unit for ", x.scalar_type());
    TORCH_CHECK(inputs % 32 == 0, inputs, " inputs are no multiple of 32");
  }
  std::array<microtome::Linear, kCount> layers{};
  for (size_t i = 0; i < kCount; ++i) {
    layers[i].x = rows.const_data_ptr();
    layers[i].x_stride = rows.stride(0);
    layers[i].packed = weights[i].packed.const_data_ptr();
    layers[i].bias = weights[i].bias ? weights[i].bias->const_data_ptr() : nullptr;
    layers[i].rows = rows.size(0);
    layers[i].inputs = inputs;
    layers[i].outputs = weights[i].outputs;
    layers[i].threads = threads();
  }
  return layers;
}

Tensor rows_of(const Tensor& x) {
  const Tensor flat = x.reshape({-1, x.size(-1)});
  return flat.stride(1) == 1 ? flat : flat.contiguous();
}

Tensor result_of(const Tensor& x, int64_t outputs) {
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  return at::empty(shape, x.options());
}

template <size_t kCount>
std::array<Tensor, kCount> run(const Tensor& x, const std::array<Weight, kCount>& weights, Unit unit) {
  for (const Weight& weight : weights) check(x, weight);
  const Tensor rows = rows_of(x);
  std::array<microtome::Linear, kCount> layers = lay_out(x, rows, weights, unit);
  std::array<Tensor, kCount> results;
  for (size_t i = 0; i < kCount; ++i) {
    results[i] = result_of(x, weights[i].outputs);
    layers[i].y = results[i].data_ptr();
  }
  if (rows.size(0) == 0) return results;
  if (x.scalar_type() == at::kFloat) {
    microtome::linear_float32(layers.data(), kCount);
  } else {
    microtome::linear_bfloat16(layers.data(), kCount, unit);
  }
  return results;
}

Tensor run_gated(const Tensor& x, const std::array<Weight, 2>& weights, Unit unit) {
  for (const Weight& weight : weights) check(x, weight);
  TORCH_CHECK(weights[0].outputs == weights[1].outputs, "a gate of ", weights[0].outputs, " outputs does not fit ",
              weights[1].outputs);
  const Tensor rows = rows_of(x);
  std::array<microtome::Linear, 2> layers = lay_out(x, rows, weights, unit);
  Tensor result = result_of(x, weights[0].outputs);
  if (rows.size(0) == 0) return result;
  const bool float32 = x.scalar_type() == at::kFloat;
  std::array<Tensor, 2> room;
  if (float32 || microtome::gated_needs_room(rows.size(0), unit)) {
    for (size_t i = 0; i < 2; ++i) {
      room[i] = result_of(x, weights[i].outputs);
      layers[i].y = room[i].data_ptr();
    }
  }
  if (float32) {
    microtome::gated_float32(layers[0], layers[1], result.data_ptr());
  } else {
    microtome::gated_bfloat16(layers[0], layers[1], result.data_ptr(), unit);
  }
  return result;
}

Unit widest_unit() {
  static const Unit unit = microtome::bfloat16_unit();
  return unit;
}

using Bias = std::optional<Tensor>;

Tensor packed_linear(const Tensor& x, const Tensor& packed, const Bias& bias, int64_t outputs) {
  return run<1>(x, {{{packed, bias, outputs}}}, widest_unit())[0];
}

std::tuple<Tensor, Tensor> packed_linear_2(const Tensor& x, const Tensor& packed, const Bias& bias, int64_t outputs,
                                           const Tensor& packed_1, const Bias& bias_1, int64_t outputs_1) {
  auto results = run<2>(x, {{{packed, bias, outputs}, {packed_1, bias_1, outputs_1}}}, widest_unit());
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor, Tensor> packed_linear_3(const Tensor& x, const Tensor& packed, const Bias& bias,
                                                   int64_t outputs, const Tensor& packed_1, const Bias& bias_1,
                                                   int64_t outputs_1, const Tensor& packed_2, const Bias& bias_2,
                                                   int64_t outputs_2) {
  auto results = run<3>(
      x, {{{packed, bias, outputs}, {packed_1, bias_1, outputs_1}, {packed_2, bias_2, outputs_2}}}, widest_unit());
  return {results[0], results[1], results[2]};
}

// The same on the narrower unit, so that it is tested where there is a wider one.
Tensor packed_linear_vectors(const Tensor& x, const Tensor& packed, const Bias& bias, int64_t outputs) {
  const Unit unit = widest_unit() == Unit::kNone ? Unit::kNone : Unit::kVectors;
  return run<1>(x, {{{packed, bias, outputs}}}, unit)[0];
}

Tensor packed_gated(const Tensor& x, const Tensor& gate, const Bias& gate_bias, const Tensor& up, const Bias& up_bias,
                    int64_t outputs) {
  return run_gated(x, {{{gate, gate_bias, outputs}, {up, up_bias, outputs}}}, widest_unit());
}

Tensor packed_gated_vectors(const Tensor& x, const Tensor& gate, const Bias& gate_bias, const Tensor& up,
                            const Bias& up_bias, int64_t outputs) {
  const Unit unit = widest_unit() == Unit::kNone ? Unit::kNone : Unit::kVectors;
  return run_gated(x, {{{gate, gate_bias, outputs}, {up, up_bias, outputs}}}, unit);
}

void check_between(const Tensor& x) {
  TORCH_CHECK(microtome::float32_served() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16),
              "this CPU has no unit for ", x.scalar_type());
}

microtome::Norm norm_of(const Tensor& a, const Tensor& weight, double epsilon, const Tensor& y) {
  check_between(a);
  TORCH_CHECK(a.dim() >= 1 && weight.dim() == 1 && weight.size(0) == a.size(-1) && weight.is_contiguous() &&
                  weight.scalar_type() == a.scalar_type(),
              "the norm's weight is not a dense vector of ", a.size(-1));
  return {a.const_data_ptr(), nullptr, weight.const_data_ptr(), nullptr, y.data_ptr(), a.numel() / a.size(-1),
          a.size(-1), float(epsilon), threads()};
}

Tensor norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor dense = x.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  microtome::norm(norm_of(dense, weight, epsilon, y), x.scalar_type() == at::kFloat);
  return y;
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& a, const Tensor& b, const Tensor& weight, double epsilon) {
  TORCH_CHECK(a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(), a.sizes(), " and ", b.sizes(),
              " are not added row by row");
  const Tensor dense_a = a.contiguous(), dense_b = b.contiguous();
  Tensor sum = at::empty(a.sizes(), a.options()), y = at::empty(a.sizes(), a.options());
  microtome::Norm asked = norm_of(dense_a, weight, epsilon, y);
  asked.b = dense_b.const_data_ptr();
  asked.sum = sum.data_ptr();
  microtome::norm(asked, a.scalar_type() == at::kFloat);
  return {sum, y};
}

// q and k [1, heads, T, H] whose last axis is dense, cos and sin [1, T, H]; the same shapes, tokens apart by all heads.
std::tuple<Tensor, Tensor> rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  check_between(q);
  microtome::Turned turned[2];
  Tensor results[2];
  const Tensor dense_cos = cos.contiguous(), dense_sin = sin.contiguous();
  for (int i = 0; i < 2; ++i) {
    const Tensor& x = i ? k : q;
    TORCH_CHECK(x.dim() == 4 && x.size(0) == 1 && x.stride(3) == 1 && x.size(3) % 2 == 0 &&
                    x.scalar_type() == q.scalar_type(),
                "heads of shape ", x.sizes(), " cannot be turned");
    for (const Tensor* angle : {&dense_cos, &dense_sin}) {
      TORCH_CHECK(angle->dim() == 3 && angle->size(0) == 1 && angle->size(1) == x.size(2) &&
                      angle->size(2) == x.size(3) && angle->scalar_type() == x.scalar_type(),
                  "angles of shape ", angle->sizes(), " do not fit heads of shape ", x.sizes());
    }
    Tensor y = at::empty({1, x.size(2), x.size(1), x.size(3)}, x.options());
    turned[i] = {x.const_data_ptr(), x.stride(2), x.stride(1), x.size(1), y.data_ptr()};
    results[i] = y.transpose(1, 2);
  }
  const microtome::Turn turn{dense_cos.const_data_ptr(), dense_sin.const_data_ptr(), q.size(2), q.size(3), threads()};
  microtome::rotate(turned, 2, turn, q.scalar_type() == at::kFloat);
  return {results[0], results[1]};
}

// 0: none, 1: vectors, 2: the matrix unit.
int64_t bfloat16_unit() { return int64_t(microtome::bfloat16_unit()); }
bool float32_served() { return microtome::float32_served(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(microtome, m) {
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def(
      "packed_linear_2(Tensor x, Tensor packed, Tensor? bias, int outputs, Tensor packed_1, Tensor? bias_1, "
      "int outputs_1) -> (Tensor, Tensor)");
  m.def(
      "packed_linear_3(Tensor x, Tensor packed, Tensor? bias, int outputs, Tensor packed_1, Tensor? bias_1, "
      "int outputs_1, Tensor packed_2, Tensor? bias_2, int outputs_2) -> (Tensor, Tensor, Tensor)");
  m.def("packed_linear_vectors(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def("packed_gated(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, int outputs) -> Tensor");
  m.def(
      "packed_gated_vectors(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, int outputs) -> "
      "Tensor");
  m.def("norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("add_norm(Tensor a, Tensor b, Tensor weight, float epsilon) -> (Tensor, Tensor)");
  m.def("rotate(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("bfloat16_unit() -> int", bfloat16_unit);
  m.def("float32_served() -> bool", float32_served);
}

TORCH_LIBRARY_IMPL(microtome, CPU, m) {
  m.impl("packed_linear", packed_linear);
  m.impl("packed_linear_2", packed_linear_2);
  m.impl("packed_linear_3", packed_linear_3);
  m.impl("packed_linear_vectors", packed_linear_vectors);
  m.impl("packed_gated", packed_gated);
  m.impl("norm", norm);
  m.impl("add_norm", add_norm);
  m.impl("rotate", rotate);
  m.impl("packed_gated_vectors", packed_gated_vectors);
}
