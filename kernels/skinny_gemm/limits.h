// The limits of skinny_gemm, which csrc/nn reads without CUDA and girih.nn.functional.step repeats.
#pragma once

namespace girih::kernels {

constexpr int kSkinnyGemmMaxRows = 16;
constexpr int kSkinnyGemmMaxMatrices = 8;
constexpr int kSkinnyGemmMaxWidth = 8192;
constexpr int kSkinnyGemmMaxElements = 96 * 1024;  // rows * width: the input is in shared memory

}  // namespace girih::kernels
