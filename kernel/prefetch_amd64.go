//go:build !purego

package kernel

import "unsafe"

// prefetchLines asks for n lines of 64 bytes from an address on.
//
//go:noescape
func prefetchLines(address unsafe.Pointer, n int)
