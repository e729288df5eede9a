#include "cat_attention/sm90/query_gradients.cuh"

namespace girih::kernels {

template cudaError_t try_cat_group_query_gradients<__half, 64>(const CatQueryGradients&, cudaStream_t, bool&);
template cudaError_t try_cat_group_query_gradients<__half, 128>(const CatQueryGradients&, cudaStream_t,
                                                                bool&);

}  // namespace girih::kernels
