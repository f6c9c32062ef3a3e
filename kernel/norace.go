//go:build !race

package kernel

func markSpan(Span) {}
