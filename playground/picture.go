package playground

import (
	"fmt"
	"strings"
)

// Picture is a bar for each of several.
type Picture struct {
	Bars []Bar
	// Whole is the value of a bar of full length.
	Whole int
	// Passing is set while things are moving: those who see one line after the other are spared it.
	Passing bool
	// Below is a line under the bars, where they are drawn.
	Below string
	// Stays keeps it among the lines of the story.
	Stays bool
}

// Bar is one of them.
type Bar struct {
	Name string
	// Value is what there is, and Coming what is on its way.
	Value, Coming int
	// Note follows the value.
	Note string
}

const (
	pictureIndent = "           "
	longestBar    = 60
	shortBar      = 12 // in a line of all bars
)

// rows draws it: a row for each bar, none longer than width.
func (p Picture) rows(width int, paint func(code, text string) string) []string {
	names := 0
	for _, b := range p.Bars {
		names = max(names, len(b.Name))
	}
	// Besides the bar there is room for a value and a note.
	length := max(min(width-len(pictureIndent)-names-30, longestBar), 8)
	var rows []string
	for _, b := range p.Bars {
		full := p.blocks(b.Value, length)
		light := strings.Repeat("░", max(p.blocks(b.Value+b.Coming, length)-full, 0))
		row := pictureIndent + fmt.Sprintf("%-*s ", names, b.Name) + paint(cyan, strings.Repeat("█", full)+light)
		if full+len([]rune(light)) > 0 {
			row += " "
		}
		row += fmt.Sprint(b.Value)
		if b.Note != "" {
			row += "  " + paint(dim, b.Note)
		}
		rows = append(rows, row)
	}
	if p.Below != "" {
		below := []rune(pictureIndent + p.Below)
		rows = append(rows, paint(dim, string(below[:min(len(below), max(width-1, 0))])))
	}
	return rows
}

// state is what has to change for another line.
func (p Picture) state() string {
	var parts []string
	for _, b := range p.Bars {
		if b.Value > 0 {
			parts = append(parts, fmt.Sprint(b.Name, b.Value))
		}
	}
	return strings.Join(parts, " ")
}

// line says it in one line.
func (p Picture) line() string {
	var parts []string
	for _, b := range p.Bars {
		full := p.blocks(b.Value, shortBar)
		part := fmt.Sprintf("%s %s%s %d", b.Name, strings.Repeat("█", full), strings.Repeat("·", shortBar-full), b.Value)
		if b.Note != "" {
			part += " " + b.Note
		}
		parts = append(parts, part)
	}
	return pictureIndent + strings.Join(parts, "   ")
}

// blocks is the length of a bar of which Whole would be length: at least one for what is not nothing.
func (p Picture) blocks(value, length int) int {
	if value <= 0 || p.Whole <= 0 {
		return 0
	}
	return min(max((value*length+p.Whole/2)/p.Whole, 1), length)
}
