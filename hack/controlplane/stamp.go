package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
)

const stampFile = ".stamp.json"

// stamp remembers what the programs in a directory were built from.
type stamp struct {
	// Quick sums up go.mod, go.sum, the Go version and this command's own rules: when it is unchanged, so is everything.
	Quick string `json:"quick"`
	// Programs sums up, for each program, the modules that it is made of, the Go version and the flags.
	Programs map[string]string `json:"programs"`
}

// readStamp reads the file; without one, or with a broken one, everything has to be built.
func readStamp(path string) stamp {
	var s stamp
	if data, err := os.ReadFile(path); err == nil {
		if json.Unmarshal(data, &s) != nil {
			s = stamp{}
		}
	}
	if s.Programs == nil {
		s.Programs = map[string]string{}
	}
	return s
}

func (s stamp) write(path string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	next := path + ".new"
	if err := os.WriteFile(next, append(data, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// sum is a hash of the parts, each kept apart from the next.
func sum(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// environment is what a build depends on besides modules and flags. The go command is asked, not this program, because
// it may have switched to another toolchain.
func environment(ctx context.Context) (string, error) {
	return goCommand(ctx, "env", "GOVERSION", "GOOS", "GOARCH", "GOFLAGS", "CGO_ENABLED", "GOEXPERIMENT")
}

func quickSum(ctx context.Context) (string, error) {
	parts := []string{runtime.Version()}
	env, err := environment(ctx)
	if err != nil {
		return "", err
	}
	parts = append(parts, env)
	for _, file := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("to be run at the root of the repository: %w", err)
		}
		parts = append(parts, string(data))
	}
	for _, p := range programs {
		// The flags with a fixed version: they change with this command.
		parts = append(parts, p.name, p.pkg, p.ldflags(nil))
	}
	return sum(parts...), nil
}

// findStale returns the programs that have to be built, and the sum that each will have then.
func findStale(ctx context.Context, dir string, wanted []program, last stamp, force bool) (
	stale []program, sums map[string]string, err error,
) {
	versions, err := moduleVersions(ctx)
	if err != nil {
		return nil, nil, err
	}
	env, err := environment(ctx)
	if err != nil {
		return nil, nil, err
	}
	sums = map[string]string{}
	for _, p := range wanted {
		out, err := goCommand(ctx, "list", "-deps", "-f", "{{with .Module}}{{.Path}} {{.Version}}{{end}}", p.pkg)
		if err != nil {
			return nil, nil, err
		}
		modules := strings.Split(out, "\n")
		sort.Strings(modules)
		p.flags = p.ldflags(versions)
		p.version = versions[p.module]
		sums[p.name] = sum(env, p.pkg, p.flags, strings.Join(compact(modules), "\n"))
		if force || last.Programs[p.name] != sums[p.name] || !isProgram(filepath.Join(dir, p.name)) {
			stale = append(stale, p)
		}
	}
	return stale, sums, nil
}

// compact drops repeated lines of a sorted list.
func compact(lines []string) []string {
	kept := lines[:0]
	for i, line := range lines {
		if i == 0 || line != lines[i-1] {
			kept = append(kept, line)
		}
	}
	return kept
}

// allThere says whether every program is in dir and was built by this command.
func allThere(dir string, wanted []program, last stamp) bool {
	for _, p := range wanted {
		if last.Programs[p.name] == "" || !isProgram(filepath.Join(dir, p.name)) {
			return false
		}
	}
	return true
}

// removeIfThere removes a file that may not be there.
func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
