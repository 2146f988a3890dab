// What the <op>_ops.cpp files share: torch's stable ABI, checks, the current stream. Host code only.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "dtype.h"

#ifdef DT_CUDA
// Weak, so that a library with CUDA kernels also loads where torch has no CUDA. (Stream::nativeHandle() came with torch 2.13.)
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace dt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline bool is_supported(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}
inline DType dtype_of(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(is_supported(type), op, ": ", name, " has dtype number ", int(type),
                  "; the kernels take float32, bfloat16 and float16: use fused=False for others");
  return type == ScalarType::Float ? F32 : type == ScalarType::BFloat16 ? BF16 : F16;
}
inline void check_same(const Tensor& tensor, const Tensor& like, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel() && tensor.dim() == like.dim(), op,
                  ": ", name, " must have the shape and dtype of the input beside it");
}
inline const void* pointer(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
// The tensor itself where it is contiguous, else a copy that is.
inline Tensor dense(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }
inline MaybeTensor dense(const MaybeTensor& tensor) { return tensor ? MaybeTensor(dense(*tensor)) : std::nullopt; }

// Runs f(begin, end) over [0, n) on torch's threads, none with fewer than `grain` items.
using torch::stable::parallel_for;

#ifdef DT_CUDA
inline void* current_stream(const Tensor& tensor) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "a CUDA tensor, but this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}
inline void check_launch(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, op, ": the launch failed with cudaError ", error);
}
#endif

}  // namespace dt
