// The guard that turns autocast on, the C++ twin of torch.autocast.
#include <ATen/autocast_mode.h>
#include <girih/nn.h>

namespace girih::nn {

Autocast::Autocast(at::Device device, at::ScalarType dtype, bool enabled)
    : device_(device.type()),
      before_(at::autocast::get_autocast_dtype(device_)),
      was_enabled_(at::autocast::is_autocast_enabled(device_)) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_enabled(device_, enabled);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, before_);
}

}  // namespace girih::nn
