//go:build !race

package vnaffinity

const underRace = false
