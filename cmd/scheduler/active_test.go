package main

import (
	"os"
	"path/filepath"
	"testing"
)

// Active replicas wait for no election; whether there is one is said by the flag, else by the file, else by kube-scheduler's
// default.
func TestWhetherALeaderIsElected(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	for _, test := range []struct {
		name, file, flag string
		want             bool
	}{
		{"by default", "", "", true},
		{"by a file that says nothing", head, "", true},
		{"by the file", head + "leaderElection: {leaderElect: false}\n", "", false},
		{"by the flag", head + "leaderElection: {leaderElect: true}\n", "false", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := ""
			if test.file != "" {
				file = filepath.Join(t.TempDir(), "scheduler.yaml")
				if err := os.WriteFile(file, []byte(test.file), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			command := newCommand()
			if test.flag != "" {
				if err := command.Flags().Set("leader-elect", test.flag); err != nil {
					t.Fatal(err)
				}
			}
			if got, err := electsLeader(command, file); err != nil || got != test.want {
				t.Errorf("%v, %v, want %v", got, err, test.want)
			}
		})
	}
}
