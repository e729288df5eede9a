# The versions of PyTorch that girih builds with and loads beside, by their minor versions.
#
# python/girih/_library.py is the one list: `OLDEST` and `NEWEST`, both as "2.11".
set(file ${CMAKE_CURRENT_LIST_DIR}/../python/girih/_library.py)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
file(READ ${file} text)
foreach(name OLDEST NEWEST)
  if(NOT text MATCHES "${name} = \"([0-9]+\\.[0-9]+)\"")
    message(FATAL_ERROR "${file}: no ${name} = \"major.minor\"")
  endif()
  set(GIRIH_TORCH_${name} ${CMAKE_MATCH_1})
endforeach()

# Sets `minor` of the calling scope to the minor version of `version`: 2.15 of 2.15.0+cpu.
function(girih_torch_minor version)
  if(NOT version MATCHES "^([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "not a version of PyTorch: ${version}")
  endif()
  set(minor ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()
