package process_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/drover-sh/drover/internal/process"
)

// portsEnv makes this test binary choose ports and print them until its standard input ends.
const portsEnv = "DROVER_TEST_PORTS"

// drawn is how many ports each process chooses: of ten thousand, two would meet if they chose without regard to each other.
const drawn = 500

func draw() {
	for range drawn {
		port, err := process.FreePort()
		if err != nil {
			panic(err)
		}
		fmt.Println(port)
	}
	fmt.Println("done")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// Ports are used long after they were chosen, here and in other processes: each is chosen once.
func TestAPortIsGivenToOneOnly(t *testing.T) {
	other := exec.Command(os.Args[0])
	other.Env = append(os.Environ(), portsEnv+"=1")
	hold, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	given := map[string]bool{}
	for range drawn {
		port, err := process.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if port >= 32768 {
			t.Fatalf("port %d is one that the kernel gives to connections", port)
		}
		if given[fmt.Sprint(port)] {
			t.Errorf("port %d was given twice", port)
		}
		given[fmt.Sprint(port)] = true
	}
	theirs := 0
	for word := ""; ; theirs++ {
		if _, err := fmt.Fscan(out, &word); err != nil {
			t.Fatal(err)
		}
		if word == "done" {
			break
		}
		if given[word] {
			t.Errorf("port %s was given to two processes", word)
		}
	}
	if theirs != drawn {
		t.Errorf("the other process chose %d ports, want %d", theirs, drawn)
	}
	_ = hold.Close()
	if err := other.Wait(); err != nil {
		t.Error(err)
	}
}
