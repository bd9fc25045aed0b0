package controlplane

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// AssetsEnv is the environment variable that names a directory of ready-made control plane programs.
const AssetsEnv = "KUBEBUILDER_ASSETS"

const modulePath = "github.com/drover-sh/drover"

// ErrNoBinary is wrapped by Binary's error when the program is nowhere.
var ErrNoBinary = errors.New("not built yet: run `make control-plane`")

// Binary finds a program of the control plane: in KUBEBUILDER_ASSETS where that is set and has it, else in
// bin/control-plane of the repository.
func Binary(name string) (string, error) {
	var dirs []string
	if dir := os.Getenv(AssetsEnv); dir != "" {
		dirs = append(dirs, dir)
	}
	root, rootErr := RepositoryRoot()
	if rootErr == nil {
		dirs = append(dirs, filepath.Join(root, "bin", "control-plane"))
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return filepath.Abs(path)
		}
	}
	if len(dirs) == 0 {
		return "", rootErr
	}
	return "", fmt.Errorf("program %s: %w (looked in %s)", name, ErrNoBinary, strings.Join(dirs, ", "))
}

// Assets is the directory in which Binary finds kube-apiserver.
func Assets() (string, error) {
	path, err := Binary("kube-apiserver")
	if err != nil {
		return "", err
	}
	return filepath.Dir(path), nil
}

// RepositoryRoot is the directory of this module's go.mod: above the working directory, or above the running program.
func RepositoryRoot() (string, error) {
	var starts []string
	if wd, err := os.Getwd(); err == nil {
		starts = append(starts, wd)
	}
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			starts = append(starts, filepath.Dir(exe))
		}
	}
	for _, dir := range starts {
		for {
			if isRoot(dir) {
				return dir, nil
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				break
			}
			dir = parent
		}
	}
	return "", fmt.Errorf("no checkout of %s above %s", modulePath, strings.Join(starts, " or "))
}

func isRoot(dir string) bool {
	f, err := os.Open(filepath.Join(dir, "go.mod"))
	if err != nil {
		return false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if module, ok := strings.CutPrefix(strings.TrimSpace(lines.Text()), "module "); ok {
			return strings.TrimSpace(module) == modulePath
		}
	}
	return false
}
