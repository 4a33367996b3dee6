package cri

import (
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestReportIsRead(t *testing.T) {
	got, err := parse([]byte(`[{"SpecReports": [
		{"LeafNodeType": "BeforeSuite", "State": "passed"},
		{"ContainerHierarchyTexts": ["[k8s.io] Streaming", "exec"], "LeafNodeType": "It", "LeafNodeText": "works", "State": "passed", "RunTime": 2000000000},
		{"ContainerHierarchyTexts": ["[k8s.io] AppArmor"], "LeafNodeType": "It", "LeafNodeText": "works", "State": "skipped", "Failure": {"Message": "no\n AppArmor"}},
		{"ContainerHierarchyTexts": ["[k8s.io] Networking"], "LeafNodeType": "It", "LeafNodeText": "works", "State": "timedout", "Failure": {"Message": "too slow"}},
		{"ContainerHierarchyTexts": ["[k8s.io] Idempotence"], "LeafNodeType": "It", "LeafNodeText": "not chosen", "State": "skipped"}
	]}]`))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Outcome{
		"Streaming exec works": {State: Passed, Time: 2 * time.Second},
		"AppArmor works":       {State: Skipped, Why: "no AppArmor"},
		"Networking works":     {State: Failed, Why: "too slow"},
	}
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	if _, err := parse([]byte(`{`)); err == nil {
		t.Error("half a report is read")
	}
}

func TestCompare(t *testing.T) {
	theirs := map[string]Outcome{"a": {State: Passed}, "b": {State: Failed, Why: "their bug"}, "c": {State: Skipped}, "d": {State: Passed}}
	for _, tt := range []struct {
		name   string
		ours   map[string]Outcome
		better map[string]string
		want   []string // beginnings of lines
	}{
		{"equal", theirs, nil, nil},
		{
			"worse",
			map[string]Outcome{"a": {State: Failed, Why: "our bug"}, "b": {State: Failed}, "c": {State: Skipped}, "d": {State: Skipped}},
			nil,
			[]string{"a: failed, and there passed: our bug", "d: skipped, and there passed"},
		},
		{"better", map[string]Outcome{"a": {State: Passed}, "b": {State: Passed}, "c": {State: Skipped}, "d": {State: Passed}}, map[string]string{"b": "we do that"}, nil},
		{
			"better by chance",
			map[string]Outcome{"a": {State: Passed}, "b": {State: Passed}, "c": {State: Skipped}, "d": {State: Passed}},
			nil,
			[]string{"b: passed, and there failed: their bug"},
		},
		{"no longer better", theirs, map[string]string{"b": "we do that"}, []string{"b: failed, and should pass because we do that"}},
		{
			"others",
			map[string]Outcome{"a": {State: Passed}, "b": {State: Failed}, "c": {State: Skipped}, "e": {State: Passed}},
			nil,
			[]string{"d: does not run", "e: passed, and does not run there"},
		},
	} {
		got := Compare(tt.ours, theirs, tt.better)
		if !slices.EqualFunc(got, tt.want, strings.HasPrefix) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestExcuses(t *testing.T) {
	got := unexcused(map[string]Outcome{
		"AppArmor runtime should support apparmor field":                                      {State: Skipped},
		"AppArmor runtime should prefer new apparmor field":                                   {State: Failed, Why: "a bug"},
		"Image Manager public image with digest should be pulled and removed [Conformance]":   {State: Failed},
		"Streaming runtime should support streaming interfaces runtime should support attach": {State: Skipped},
		"Networking": {State: Passed},
	}, excuses)
	want := []string{"AppArmor runtime should prefer", "Streaming runtime should support"}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("%q, want %q", got, want)
	}
}
