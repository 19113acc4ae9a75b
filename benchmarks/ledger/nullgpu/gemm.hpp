// One matrix product, D[m, n] = op(A)[m, k] op(B)[k, n], column by column as BLAS counts.
#pragma once

#include "nullgpu.hpp"

#include <library_types.h>

namespace nullgpu {

struct Gemm {
  const char* call;
  int transpose_a, transpose_b;
  long m, n, k;
  cudaDataType a, b, c;
  long batch;
  std::string more = "";
};

inline const char* dtype(cudaDataType type) {
  switch (type) {
    case CUDA_R_64F: return "float64";
    case CUDA_R_32F: return "float32";
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_8I: return "int8";
    case CUDA_R_32I: return "int32";
    case CUDA_R_8F_E4M3: return "float8_e4m3fn";
    case CUDA_R_8F_E5M2: return "float8_e5m2";
    case CUDA_R_4F_E2M1: return "float4_e2m1fn";
    default: return "another";
  }
}

inline void record_gemm(const Gemm& g) {
  if (!recording()) return;
  record("gemm", g.call,
         text("m=%ld n=%ld k=%ld ta=%d tb=%d a=%s b=%s c=%s batch=%ld %s", g.m, g.n, g.k, g.transpose_a, g.transpose_b,
              dtype(g.a), dtype(g.b), dtype(g.c), g.batch, g.more.c_str()));
}

}  // namespace nullgpu
