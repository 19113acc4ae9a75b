// cuBLASLt: descriptors are the real library's; choosing an algorithm refuses what the hardware refuses.
#include "gemm.hpp"

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

using nullgpu::device;
using nullgpu::record;
using nullgpu::text;

namespace {

// the real library's function behind the one of the same name, which torch's wheel brings
template <class Function>
Function* real(const char* name) {
  static void* library = dlopen("libcublasLt.so.13", RTLD_LAZY);
  void* symbol = dlsym(library ? library : RTLD_NEXT, name);
  if (!symbol) {
    fprintf(stderr, "null GPU: cuBLASLt has no %s\n", name);
    abort();
  }
  return (Function*)symbol;
}

// attributes have 1, 4 or 8 bytes: the first size that cuBLASLt accepts is theirs
template <class Get>
long read(Get get) {
  size_t written;
  uint32_t four = 0;
  uint64_t eight = 0;
  int8_t one = 0;
  if (get(&four, sizeof four, &written) == CUBLAS_STATUS_SUCCESS) return four;
  if (get(&eight, sizeof eight, &written) == CUBLAS_STATUS_SUCCESS) return (long)eight;
  get(&one, sizeof one, &written);
  return one;
}

long of(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which) {
  auto get = real<decltype(cublasLtMatrixLayoutGetAttribute)>("cublasLtMatrixLayoutGetAttribute");
  return read([&](void* to, size_t size, size_t* written) { return get(layout, which, to, size, written); });
}

long of(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t which) {
  auto get = real<decltype(cublasLtMatmulDescGetAttribute)>("cublasLtMatmulDescGetAttribute");
  return read([&](void* to, size_t size, size_t* written) { return get(product, which, to, size, written); });
}

bool is_fp8(long type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
bool is_fp4(long type) { return type == CUDA_R_4F_E2M1; }

// the architectures of each way to scale, by the table "scaling modes" of cuBLASLt's documentation
const char* refused_scales(long mode) {
  int capability = device().capability();
  switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F: return nullptr;
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: return capability == 90 ? nullptr : "row_scales_need_9.0";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: return capability == 90 ? nullptr : "block_scales_need_9.0";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0: return capability >= 100 ? nullptr : "mxfp8_needs_10.0";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3: return capability >= 100 ? nullptr : "nvfp4_needs_10.0";
    default: return "unknown_scale_mode";
  }
}

// why this hardware has no kernel for the product; nullptr: it has one
const char* refusal(cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b) {
  long type_a = of(a, CUBLASLT_MATRIX_LAYOUT_TYPE), type_b = of(b, CUBLASLT_MATRIX_LAYOUT_TYPE);
  int capability = device().capability();
  if (is_fp4(type_a) || is_fp4(type_b)) {
    if (capability < 100) return "fp4_needs_10.0";
  } else if (!is_fp8(type_a) && !is_fp8(type_b)) {
    return nullptr;
  }
  if (capability < 89) return "fp8_needs_8.9";
  if (type_a == CUDA_R_8F_E5M2 && type_b == CUDA_R_8F_E5M2) return "e5m2_times_e5m2";
  bool tn = of(product, CUBLASLT_MATMUL_DESC_TRANSA) == CUBLAS_OP_T &&
            of(product, CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_N;
  bool any_layout = capability == 100 || capability == 103;  // Blackwell of data centres; Ada and Hopper take TN only
  if (!tn && (!any_layout || is_fp4(type_a))) return "not_TN";
  long per_16_bytes = is_fp4(type_a) ? 32 : 16;
  if (of(a, CUBLASLT_MATRIX_LAYOUT_LD) % per_16_bytes || of(b, CUBLASLT_MATRIX_LAYOUT_LD) % per_16_bytes)
    return "leading_dimension_not_16_bytes";
  if (const char* why = refused_scales(of(product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE))) return why;
  return refused_scales(of(product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE));
}

nullgpu::Gemm described(cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                        cublasLtMatrixLayout_t d) {
  int ta = of(product, CUBLASLT_MATMUL_DESC_TRANSA), tb = of(product, CUBLASLT_MATMUL_DESC_TRANSB);
  long k = of(a, ta ? CUBLASLT_MATRIX_LAYOUT_ROWS : CUBLASLT_MATRIX_LAYOUT_COLS);
  auto type = [](cublasLtMatrixLayout_t layout) { return (cudaDataType)of(layout, CUBLASLT_MATRIX_LAYOUT_TYPE); };
  std::string more =
      text("fast=%ld epilogue=%ld scales=%ld,%ld lda=%ld ldb=%ld", of(product, CUBLASLT_MATMUL_DESC_FAST_ACCUM),
           of(product, CUBLASLT_MATMUL_DESC_EPILOGUE), of(product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE),
           of(product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE), of(a, CUBLASLT_MATRIX_LAYOUT_LD),
           of(b, CUBLASLT_MATRIX_LAYOUT_LD));
  return {"cublasLtMatmul",
          ta,
          tb,
          of(d, CUBLASLT_MATRIX_LAYOUT_ROWS),
          of(d, CUBLASLT_MATRIX_LAYOUT_COLS),
          k,
          type(a),
          type(b),
          type(d),
          of(d, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT),
          more};
}

}  // namespace

NULLGPU_API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = (cublasLtHandle_t) new int(0);
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete (int*)handle;
  return CUBLAS_STATUS_SUCCESS;
}

NULLGPU_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product,
                                                          cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                          cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                                          cublasLtMatmulPreference_t, int,
                                                          cublasLtMatmulHeuristicResult_t* result, int* found) {
  if (const char* why = refusal(product, a, b)) {
    nullgpu::Gemm g = described(product, a, b, d);
    record("refused", "cublasLtMatmul",
           text("reason=%s m=%ld n=%ld k=%ld a=%s b=%s ta=%d tb=%d %s", why, g.m, g.n, g.k, nullgpu::dtype(g.a),
                nullgpu::dtype(g.b), g.transpose_a, g.transpose_b, g.more.c_str()));
    *found = 0;
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  memset(result, 0, sizeof *result);
  result->state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

NULLGPU_API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void*, const void*,
                                          cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t b, const void*,
                                          const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t d,
                                          const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  if (nullgpu::recording()) nullgpu::record_gemm(described(product, a, b, d));
  return CUBLAS_STATUS_SUCCESS;
}

NULLGPU_API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                                cublasLtMatmulAlgoConfigAttributes_t, void* to,
                                                                size_t size, size_t* written) {
  if (to) memset(to, 0, size);
  if (written) *written = size;
  return CUBLAS_STATUS_SUCCESS;
}
