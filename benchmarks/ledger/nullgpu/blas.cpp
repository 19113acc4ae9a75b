// cuBLAS: the matrix products that torch and Transformer Engine ask for, as records "gemm" with shapes and types.
#include "gemm.hpp"

#include <cublas_v2.h>

namespace {

struct Handle {
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t mode = CUBLAS_POINTER_MODE_HOST;
};

cublasStatus_t product(const char* call, int ta, int tb, long m, long n, long k, cudaDataType a, cudaDataType b,
                       cudaDataType c, long batch = 1) {
  nullgpu::Gemm gemm{call, ta, tb, m, n, k, a, b, c, batch};
  nullgpu::record_gemm(gemm);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

NULLGPU_API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = (cublasHandle_t) new Handle;
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete (Handle*)handle;
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
NULLGPU_API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
NULLGPU_API cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t math) {
  ((Handle*)handle)->math = math;
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* math) {
  *math = ((Handle*)handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  ((Handle*)handle)->mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
NULLGPU_API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = ((Handle*)handle)->mode;
  return CUBLAS_STATUS_SUCCESS;
}

using Op = cublasOperation_t;
using Type = cudaDataType;

NULLGPU_API cublasStatus_t cublasGemmEx(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const void*, const void*,
                                        Type a, int, const void*, Type b, int, const void*, void*, Type c, int,
                                        cublasComputeType_t, cublasGemmAlgo_t) {
  return product("cublasGemmEx", ta, tb, m, n, k, a, b, c);
}
NULLGPU_API cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const void*,
                                                      const void*, Type a, int, long long, const void*, Type b, int,
                                                      long long, const void*, void*, Type c, int, long long, int batch,
                                                      cublasComputeType_t, cublasGemmAlgo_t) {
  return product("cublasGemmStridedBatchedEx", ta, tb, m, n, k, a, b, c, batch);
}
NULLGPU_API cublasStatus_t cublasSgemm_v2(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const float*, const float*,
                                          int, const float*, int, const float*, float*, int) {
  return product("cublasSgemm", ta, tb, m, n, k, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F);
}
NULLGPU_API cublasStatus_t cublasSgemmEx(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const float*, const void*,
                                         Type a, int, const void*, Type b, int, const float*, void*, Type c, int) {
  return product("cublasSgemmEx", ta, tb, m, n, k, a, b, c);
}
NULLGPU_API cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const float*,
                                                     const float*, int, long long, const float*, int, long long,
                                                     const float*, float*, int, long long, int batch) {
  return product("cublasSgemmStridedBatched", ta, tb, m, n, k, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, batch);
}
NULLGPU_API cublasStatus_t cublasDgemm_v2(cublasHandle_t, Op ta, Op tb, int m, int n, int k, const double*,
                                          const double*, int, const double*, int, const double*, double*, int) {
  return product("cublasDgemm", ta, tb, m, n, k, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F);
}
NULLGPU_API cublasStatus_t cublasSgemv_v2(cublasHandle_t, Op ta, int m, int n, const float*, const float*, int,
                                          const float*, int, const float*, float*, int) {
  return product("cublasSgemv", ta, 0, m, 1, n, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F);
}
NULLGPU_API cublasStatus_t cublasSdot_v2(cublasHandle_t, int n, const float*, int, const float*, int, float*) {
  return product("cublasSdot", 0, 0, 1, 1, n, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F);
}
NULLGPU_API cublasStatus_t cublasDotEx(cublasHandle_t, int n, const void*, Type x, int, const void*, Type y, int, void*,
                                       Type r, Type) {
  return product("cublasDotEx", 0, 0, 1, 1, n, x, y, r);
}
