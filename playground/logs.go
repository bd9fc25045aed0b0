package playground

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// keepLogs returns a directory with the logs of a story that has just failed. Where the playground's own directory goes
// with it, that is a copy which stays.
func (p *Playground) keepLogs(story string) string {
	if p.entry == nil {
		if _, err := os.Stat(p.storyDir(story)); err == nil {
			return p.dir // it has logs of its own, beside the others
		}
		return p.LogDir()
	}
	kept, err := os.MkdirTemp("", "drover-playground-logs-"+filepath.Base(story)+"-")
	if err != nil {
		return p.LogDir()
	}
	for _, pattern := range []string{
		filepath.Join(p.LogDir(), "*.log"), filepath.Join(p.dir, "control-plane", "logs", "*.log"), filepath.Join(p.dir, "*.yaml"),
		filepath.Join(p.kueueDir(), "logs", "*.log"), filepath.Join(p.kueueDir(), "*.yaml"),
		filepath.Join(p.storyDir(story), "logs", "*.log"), filepath.Join(p.storyDir(story), "*.yaml"),
		filepath.Join(p.storyDir(story), "*.jsonl"), filepath.Join(p.storyDir(story), "programs", "logs", "*.log"),
	} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		for _, file := range files {
			if err := copyFile(filepath.Join(kept, filepath.Base(file)), file); err != nil {
				p.present.Say("  keeping logs: %v", err)
			}
		}
	}
	return kept
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err = io.Copy(out, in); err != nil {
		err = fmt.Errorf("copying %s: %w", from, err)
	}
	if closeErr := out.Close(); err == nil {
		err = closeErr
	}
	return err
}
